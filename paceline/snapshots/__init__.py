"""A snapshot's life: copied, held, backed up, committed, written to a file, restored."""
