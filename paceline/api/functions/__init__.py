"""Functions that `paceline.launch` runs in local workers: the call, and the worker's program."""
