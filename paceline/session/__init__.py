"""Session: opens, resumes and records a run, for the command and for the library."""
