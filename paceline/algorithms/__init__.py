"""Synchronization methods: each composes an exchange (who sums) and an update rule."""
