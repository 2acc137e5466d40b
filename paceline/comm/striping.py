"""How the connections to a peer share the bytes of a put.

    put    | piece 0 | piece 1           | piece 2 |
    share  | of connection 0   | of connection 1   |     equal, but for small puts

Where a share begins depends on the number of bytes and connections only, so that two puts of one
size to one place go the same ways, and what is put later lands later everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_WORTH = 2**17  # bytes; fewer go by one connection
_ALIGN = 2**12  # bytes
_NOTHING = (0, 0)

_Pieces = list[tuple[int, int]]


class Share(NamedTuple):
    """What goes by one connection.

    Attributes:
        offset: bytes from the put's begin.
        pieces: addresses and numbers of bytes; one at least, which may be empty.
    """

    offset: int
    pieces: _Pieces


def shared(pieces: Sequence[tuple[int, int]], count: int, number: int) -> list[Share]:
    """Share a put out.

    Args:
        pieces: the addresses and the numbers of its bytes.
        count: of the connections.
        number: any; small puts with different ones go by different connections.
    """
    if count == 1:
        return [Share(0, list(pieces) or [_NOTHING])]
    size = sum(length for _, length in pieces)
    if size < _WORTH:
        whole, empty = Share(0, list(pieces) or [_NOTHING]), Share(0, [_NOTHING])
        return [whole if link == number % count else empty for link in range(count)]
    ends = [size * (link + 1) // count // _ALIGN * _ALIGN for link in range(count - 1)]
    starts = [0, *ends]
    return [
        Share(start, _cut(pieces, start, stop))
        for start, stop in zip(starts, [*ends, size], strict=True)
    ]


def _cut(pieces: Sequence[tuple[int, int]], start: int, stop: int) -> _Pieces:
    """Return bytes `start` to `stop` of pieces that lie one behind another."""
    found, at = [], 0
    for address, length in pieces:
        begin, end = max(start, at), min(stop, at + length)
        if begin < end:
            found.append((address + begin - at, end - begin))
        at += length
    return found or [_NOTHING]
