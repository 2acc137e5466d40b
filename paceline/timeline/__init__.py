"""Spans of all threads and ranks on one clock: the account of a step, and the trace."""
