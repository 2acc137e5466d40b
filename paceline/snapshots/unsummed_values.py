"""Sums of the last steps before a snapshot, which are sent again in the next generation.

The ranks send their own values once more, and those of lost members of which they have copies. Some
ranks may have received the sums already; then the first of these sends them for all:

    rank 0   own values          0               rank 0   own values, a copy of rank 2's
    rank 1   own values, sums    sums            rank 1   own values
             has                 sends                    sends what it has

Without copies the ranks need the sums, and at least one rank has them then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator, total
from paceline.snapshots.own_part import OwnPart


def values_to_send(
    parts: Sequence[OwnPart], totals: Mapping[int, Tensor], communicator: Communicator
) -> dict[int, Tensor]:
    """Return the values that this rank sends, by step; collective among the new generation's ranks.

    Args:
        parts: those that this rank has: its own first, then those of members that are gone.
        totals: the sums that this rank has received, by step.
        communicator: connects the ranks.

    Raises:
        CommError: a peer was lost, or silent.
    """
    own = {step: torch.stack([part.sent[step] for part in parts]).sum(0) for step in parts[0].sent}
    if not own:
        return own
    device = next(iter(own.values())).device
    knows = torch.zeros(communicator.world_size, device=device)
    knows[communicator.rank] = own.keys() <= totals.keys()
    knowing = total(communicator, knows, "who has the sums of the last steps").nonzero()
    if not len(knowing):
        return own
    sends = communicator.rank == int(knowing[0])
    return {step: totals[step] if sends else torch.zeros_like(own[step]) for step in own}
