"""Servers: processes that own shards and compute no gradients: parameter and averaging servers."""
