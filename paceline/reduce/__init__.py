"""Sums over the ranks: buckets, the exchange protocol, collectives and the put engine."""
