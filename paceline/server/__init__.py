"""Servers: processes that own shards and compute no gradients, such as the averaging server."""
