"""SplitMix64 against published values and a plain-integer form of it."""

from __future__ import annotations

import numpy as np

from paceline.data import splitmix

_MASK = 2**64 - 1


def _reference(state: int, count: int) -> list[int]:
    """The algorithm as printed by Vigna, prng.di.unimi.it/splitmix64.c."""
    words = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        word = state
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
        words.append(word ^ (word >> 31))
    return words


def test_a_stream_is_the_published_one() -> None:
    assert splitmix.stream(1234567, 3).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_a_stream_is_the_plain_algorithms_for_large_bases_too() -> None:
    for base in (0, 1, 2**63, 2**64 - 1):
        assert splitmix.stream(base, 50).tolist() == _reference(base, 50)
        assert [splitmix.word(base, number) for number in range(50)] == _reference(base, 50)


def test_each_member_has_the_stream_of_its_own_mixed_base() -> None:
    base, members = 2**64 - 5, [0, 7, 2**40]
    rows = splitmix.streams(base, np.array(members), 4)
    for member, row in zip(members, rows.tolist(), strict=True):
        (start,) = _reference((base + member - 0x9E3779B97F4A7C15) & _MASK, 1)
        assert row == _reference(start, 4)


def test_each_place_of_a_base_counts_and_negative_numbers_do() -> None:
    bases = {splitmix.base(*v) for v in [(0, 1), (1, 0), (1, 1), (0, 0), (0,), (-1, 0), (0, -1)]}
    assert len(bases) == 7
