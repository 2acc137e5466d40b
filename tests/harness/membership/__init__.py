"""Checker of the membership protocol: random schedules drive the rules of the vote."""
