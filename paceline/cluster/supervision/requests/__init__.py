"""Asking a run's processes on this machine to stop, or how the run stands."""
