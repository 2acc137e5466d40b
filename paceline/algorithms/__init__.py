"""Synchronization methods: who sums the gradients, and which rank updates which parameters."""
