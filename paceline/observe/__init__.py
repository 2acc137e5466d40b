"""Where measurements go: the CSV log, the event file, the terminal."""
