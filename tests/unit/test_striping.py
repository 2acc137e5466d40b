"""How connections share the bytes of a put."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from paceline.comm.striping import shared

LARGE = 5_000_001


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, 2**17 - 1, 2**17, LARGE])
def test_shares_are_the_put_and_about_equal_where_it_is_large(size: int, count: int) -> None:
    draw = random.Random(size)
    memory = draw.randbytes(2 * size)
    cuts = sorted(draw.sample(range(size + 1), min(size, 5)))
    pieces = [(2 * a, b - a) for a, b in pairwise([0, *cuts, size]) if b > a]
    shares = shared(pieces, count, number=4)

    landed = bytearray(size)
    lengths = []
    for share in shares:
        at = share.offset
        for address, length in share.pieces:
            landed[at : at + length] = memory[address : address + length]
            at += length
        lengths.append(at - share.offset)
    assert landed == b"".join(memory[address : address + length] for address, length in pieces)
    assert len(lengths) == count
    assert sum(lengths) == size
    if size < 2**17:
        assert lengths.count(0) >= count - 1
    else:
        assert max(lengths) - min(lengths) <= 2 * 2**12


def test_small_puts_go_by_different_connections() -> None:
    ways = [
        [bool(share.pieces[0][1]) for share in shared([(0, 8)], 2, number)].index(True)
        for number in range(4)
    ]
    assert ways == [0, 1, 0, 1]
