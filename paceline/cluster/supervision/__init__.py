"""Starting, watching and ending a machine's workers; failure reports, signals, watchdogs."""
