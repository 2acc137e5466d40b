"""One-sided exchange: each rank has memory that its peers write into, and is told when they have.

The contract is GASPI's (https://gaspi.de, "write with notification"), in five operations:

    rank 0                                   rank 1
    put(1, offset, gradient, k, value=7) ──▶ memory[offset:] = gradient, and then
                                             values[0, k] = 7
                                             wait(0, k, 7) returns

A notification implies that its data has landed; a put of a higher priority may overtake. Nobody
acknowledges and nobody matches: who may write where, and when, is the business of the protocol
above (`sync/`). A window lives for one generation, and its memory and connections with it, so that
a late write of a stopped process hits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Source = Tensor | Sequence[Tensor] | None


class Window(Protocol):
    """A rank's memory, and its reach into its peers'.

    Attributes:
        rank: this process's number.
        world_size: the number of ranks.
        memory: (bytes,) of uint8, which peers write into.
        values: (world_size, notifications), the last value that each peer has notified; starts at
            0. Data of a value that was read here has landed.
    """

    rank: int
    world_size: int
    memory: Tensor
    values: NDArray[np.int64]

    def peer_memory(self, peer: int) -> Tensor | None:
        """Return a peer's memory where this process shares it; None where only puts get there."""

    def put(
        self,
        peer: int,
        offset: int,
        source: Source,
        notification: int,
        value: int,
        priority: int = 0,
    ) -> None:
        """Start to copy `source` into a peer's memory and to notify the peer then; never block.

        Args:
            peer: another rank.
            offset: bytes from the start of the peer's memory.
            source: dense, of any dtype, on the CPU; not to be written until `flush`. Several
                tensors land one behind another. None: only notify, of what was written through
                `peer_memory` before.
            notification: which of the peer's values of this rank to set. Puts that are under way
                with one and the same land in their order if their priorities are equal; whoever
                shares memory with the peer has written it before.
            value: what to set it to; larger than the last one.
            priority: smaller numbers go first; among equals, the earlier put.

        Raises:
            PeerLost: the peer's connection ended.
            CommError: more is under way than can be.
        """

    def wait(
        self, peer: int, notification: int, value: int, *, limit: float, operation: str
    ) -> None:
        """Return once a peer's notification has reached a value.

        Raises:
            PeerLost: its connection ended before; names the peer and the operation.
            CommTimeout: it said nothing for `limit` seconds; names both, too.
        """

    def subscribe(self, below: int) -> None:
        """Count only notifications with smaller numbers as news; at first all are."""

    def wake(self) -> None:
        """Count as news something that happened here: `wait_for_event` returns."""

    def wait_for_event(self, seen: int, limit: float) -> int:
        """Return the number of notifications and nudges, once it isn't `seen`, or at the limit.

        Raises:
            PeerLost: a peer's connection ended.
        """

    def flush(self, peer: int, *, limit: float, operation: str) -> None:
        """Return once the sources of all puts to a peer may be written again.

        Raises:
            PeerLost, CommTimeout: as `wait`.
        """

    def close(self) -> None:
        """Give up connections and memory; whoever waits gets `PeerLost`. Nothing is sent later."""


def tensors_of(source: Source) -> Sequence[Tensor]:
    """Return what a put copies, one tensor behind another."""
    return [] if source is None else [source] if isinstance(source, Tensor) else source


def bytes_of(source: Source) -> list[Tensor]:
    """View dense tensors' memory, in whatever order their values are, as (bytes,) of uint8 each."""
    return [
        tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        for tensor in tensors_of(source)
    ]
