"""What a NIXL window knows of a peer, and of a put on its way there."""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

WAIT_SLICE_S = 1.0  # with what was promised before a line ended, and with what isn't confirmed


@dataclass(order=True)
class Put:
    """A put under way: `left` of its bytes, by address and number, haven't gone to NIXL yet."""

    priority: int
    number: int
    peer: int = field(compare=False)
    sources: list[Tensor] = field(compare=False)
    offset: int = field(compare=False)
    message: bytes = field(compare=False)
    left: deque[tuple[int, int]] = field(compare=False, default_factory=deque)
    begun: bool = field(compare=False, default=False)

    def cut(self, limit: int) -> list[tuple[int, int]]:
        """Cut so many bytes off what is left."""
        pieces = []
        while self.left and limit:
            address, size = self.left.popleft()
            if size > limit:
                self.left.appendleft((address + limit, size - limit))
                size = limit
            pieces.append((address, size))
            limit -= size
        return pieces


@dataclass
class Peer:
    """A peer, by its line and by NIXL.

    Attributes:
        name: NIXL's for it.
        memory: the address of its memory there.
        puts: a heap of those that wait; `put` and `transfer` are what moves.
        promised, came: puts from it that have begun; that have arrived.
        finished, confirmed: puts to it that have left; that have arrived.
        owed: what is still to be said on the line.
        gone_at: when the line ended.
        error: why it is lost; "" as long as it isn't.
    """

    line: socket.socket
    name: str
    memory: int
    puts: list[Put] = field(default_factory=list)
    put: Put | None = None
    transfer: Any = None
    under_way: int = 0
    promised: int = 0
    came: int = 0
    finished: int = 0
    confirmed: int = 0
    owed: bytes = b""
    gone_at: float | None = None
    error: str = ""

    @property
    def expects(self) -> bool:
        """Whether NIXL has something to do for this peer."""
        moving = self.put is not None or bool(self.puts) or self.came < self.promised
        return not self.error and (moving or bool(self.owed))

    @property
    def unconfirmed(self) -> bool:
        """Whether something has left that it doesn't say it has."""
        return not self.error and self.gone_at is None and self.confirmed < self.finished

    def heard_out(self, now: float) -> bool:
        """Tell, of one whose line has ended, whether all has come that can be expected."""
        assert self.gone_at is not None
        return self.came >= self.promised or now > self.gone_at + WAIT_SLICE_S
