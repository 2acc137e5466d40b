"""Control line: connections between the members of a run, which outlive generations."""
