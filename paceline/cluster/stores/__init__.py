"""Implementations of torch's `Store`: a shared folder, a Redis server, torch's own TCP store."""
