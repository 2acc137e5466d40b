"""Where a run starts: its newest checkpoint, a given one, or the beginning; and what was edited."""
