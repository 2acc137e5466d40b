"""Own part of a snapshot: what one rank alone has (shards, residuals, unsummed values).

Sums of the last steps before a snapshot are sent again in the next generation. The ranks send their
own values once more, and those of lost members of which they have copies. Some ranks may have
received the sums already; then the first of these sends them for all:

    rank 0   own values          0               rank 0   own values, a copy of rank 2's
    rank 1   own values, sums    sums            rank 1   own values
             has                 sends                    sends what it has

Without copies the ranks need the sums, and at least one rank has them then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator, total
from paceline.errors import CommError
from paceline.replica.state_parts import POSITION, RANK, parts_of
from paceline.state.state_bytes import pack_state, unpack_state


@dataclass(frozen=True, kw_only=True)
class OwnPart:
    """What a snapshot has of one rank alone.

    Attributes:
        state: the rank's own state, besides model and optimizer (`RankState.local`).
        sent: the rank's values of the steps before the snapshot that weren't summed yet.
    """

    state: Mapping[str, Any]
    sent: Mapping[int, Tensor]

    @classmethod
    def of(cls, state: Mapping[str, Mapping[Any, Any]], pairs: int) -> Self:
        """Return the own part of a held snapshot, whose memory it shares.

        Args:
            state: the snapshot's parts.
            pairs: the number of pairs of a model and an optimizer.
        """
        own = {str(pair): parts_of(state, pair)[RANK] for pair in range(pairs)}
        return cls(state=own if pairs > 1 else own["0"], sent=state[POSITION]["sent"])

    def pack(self) -> list[memoryview]:
        """Return the part as chunks of bytes to be joined, which share its tensors' memory."""
        return pack_state({"state": self.state, "sent": self.sent})

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Self:
        """Return the part that such bytes contain; its tensors are views of them.

        Raises:
            CommError: the bytes are something else.
        """
        tree = unpack_state(data)
        if not isinstance(tree, dict) or tree.keys() != {"state", "sent"}:
            raise CommError("A copy of another rank's state has other entries than a part has.")
        return cls(state=tree["state"], sent=tree["sent"])


def values_to_send(
    parts: Sequence[OwnPart], totals: Mapping[int, Tensor], communicator: Communicator
) -> dict[int, Tensor]:
    """Return the values that this rank sends, by step; collective among the new generation's ranks.

    Args:
        parts: those that this rank has: its own first, then those of members that are gone.
        totals: the sums that this rank has received, by step.
        communicator: connects the ranks.
    """
    own = {step: torch.stack([part.sent[step] for part in parts]).sum(0) for step in parts[0].sent}
    if not own:
        return own
    device = next(iter(own.values())).device
    knows = torch.zeros(communicator.world_size, device=device)
    knows[communicator.rank] = own.keys() <= totals.keys()
    knowing = total(communicator, knows, "which ranks have the sums of the last steps").nonzero()
    if not len(knowing):
        return own
    sends = communicator.rank == int(knowing[0])
    return {step: totals[step] if sends else torch.zeros_like(own[step]) for step in own}
