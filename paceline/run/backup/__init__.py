"""Copies of what one rank alone has of a snapshot, on another rank: its backup holder."""
