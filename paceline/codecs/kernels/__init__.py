"""Implementations of the codecs and the weighted sum: compiled by numba, or plain torch."""
