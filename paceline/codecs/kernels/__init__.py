"""Implementations of the codecs and of the weighted sum, compiled by numba."""
