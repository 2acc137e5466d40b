"""A trace of a few steps of all ranks on one clock, in Chrome's format."""
