"""Random words that are a function of counters: SplitMix64.

Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. Word i of the stream
with base b is mix(b + (i + 1) · GAMMA), so that any process makes any range of any stream at once.
numpy's own generators are not used: their streams may change between versions, and a checkpoint
must mean the same order for ever.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_WORD = 2**64
_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # shift, factor


def base(*values: int) -> int:
    """Mix whole numbers into the base of a stream; each place counts."""
    mixed = 0
    for value in values:
        mixed = (mixed + value + _GAMMA) % _WORD
        for shift, factor in _ROUNDS:  # as in `mix`; numpy takes ten times as long for one word
            mixed = (mixed ^ mixed >> shift) * factor % _WORD
    return mixed


def word(start: int, number: int) -> int:
    """Return word `number` of the stream with a base."""
    return base(start + number * _GAMMA)


def stream(start: int, count: int) -> Words:
    """List the first words of the stream with a base, shape (count,), no two of them equal."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    return mix(steps + np.uint64(start))


def streams(start: int, members: npt.NDArray[np.int64], count: int) -> Words:
    """List the first words of each member's own stream, shape (len(members), count)."""
    starts = mix(members.astype(np.uint64) + np.uint64(start))
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    return mix(starts[:, None] + steps)


def mix(words: Words) -> Words:
    """Finalise words: a bijection of 64 bits in which every bit moves every other."""
    for shift, factor in _ROUNDS:
        # A new array: the first round must leave the caller's words as they are.
        words = words ^ (words >> np.uint64(shift))
        words *= np.uint64(factor)
    return words
