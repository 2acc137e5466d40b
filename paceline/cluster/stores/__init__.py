"""Implementations of torch's `Store`: a shared folder, Redis, etcd, torch's own TCP store."""
