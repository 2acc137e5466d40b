"""A run's values as they travel between groups: coded by a lossy wire, or as they are.

A lossy wire keeps what it missed, of what this rank sends to the owners and of what it sends back
as one, and adds it next time. There are two memories for that: a step reads one and writes the
other, and they change places when the step has taken effect.

    missed    [ of group 0's shard, which is sent | … | of its own, which is sent back | … ]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.sync.layout import Run
from paceline.sync.pieces import Piece
from paceline.sync.wires import Wire


class Coding:
    """Codes a run's shards of one channel.

    Args:
        run: whose.
        channel: which this rank owns.
        wire: a lossy one.

    Attributes:
        missed: (slice,), of each value what hasn't been sent yet, by the steps that took effect.
    """

    def __init__(self, run: Run, channel: int, wire: Wire) -> None:
        self._wire = wire
        values = run.channel(channel)
        self._first = values.start
        self.missed = torch.zeros(values.stop - values.start, dtype=run.spec.dtype)
        self._misses = torch.zeros_like(self.missed)  # of the step that runs
        groups = len(run.shards[channel]) - 1
        self._shards = [run.shard(channel, group) for group in range(groups)]
        self._data = [
            torch.zeros(wire.size(shard.stop - shard.start), dtype=torch.uint8)
            for shard in self._shards
        ]

    def encode(self, group: int, pieces: Sequence[Piece], weight: float) -> Tensor:
        """Code what goes to a group's owner: pieces of its shard. Returns (bytes,)."""
        shard, data = self._shards[group], self._data[group]
        place = slice(shard.start - self._first, shard.stop - self._first)
        self._wire.encode(pieces, weight, self.missed[place], data, self._misses[place])
        return data

    def encode_sums(self, group: int, sums: Tensor) -> Tensor:
        """Code this rank's own shard, (values,), and let the sums be what the others decode."""
        data = self.encode(group, [(0, len(sums), sums)], 1.0)
        self._wire.decode(data, sums)
        return data

    def add(self, data: Tensor, sums: Tensor) -> None:
        """Add what another group has sent to sums."""
        self._wire.add(data, sums)

    def decode(self, data: Tensor, sums: Tensor) -> None:
        """Write what another group's owner has sent back."""
        self._wire.decode(data, sums)

    def keep(self) -> None:
        """Let the last step have taken effect."""
        self.missed, self._misses = self._misses, self.missed
