"""LevelDB, read by any number of processes at once."""
