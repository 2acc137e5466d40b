"""What lossy wires have yet to send, as a checkpoint keeps it: by parameter, for each group.

    {"scale": 1.0, "missed": [ {"fc.weight": (10, 512), …} of group 0, {…} of group 1, … ]}

For a value that a group doesn't own it is what the group's own gradients still lack at the owner,
for one that it owns what the sum still lacks at the others. Both are parts of the sum, so a world
of another number of groups goes on with the total, which the owners add to their next sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator, gather_all
from paceline.reduce.buckets import like
from paceline.reduce.put_engine.error_feedback import ErrorFeedback
from paceline.reduce.put_engine.layout import BucketLayout, Topology


@dataclass(frozen=True, kw_only=True)
class CodedBucket:
    """A run that a lossy wire codes.

    Attributes:
        bucket_layout: its places.
        templates: tensors of its parameters' shapes and strides.
        names: of its parameters.
        feedback: this rank's; None where it owns no channel.
    """

    bucket_layout: BucketLayout
    templates: Sequence[Tensor]
    names: Sequence[str]
    feedback: ErrorFeedback | None

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """View the run's values, (numel,), by parameter."""
        ends = list(accumulate(self.bucket_layout.spec.lengths))
        parts = zip(self.names, self.templates, [0, *ends], ends, strict=False)
        return {name: like(template, flat[a:b]) for name, template, a, b in parts}


class Residuals:
    """What this rank and the others have missed.

    Args:
        coded: all runs of lossy wires.
        topology: of the ranks.
        rank: this one.
        applied: whether the last step took effect.
    """

    def __init__(
        self, coded: Sequence[CodedBucket], topology: Topology, rank: int, *, applied: bool
    ) -> None:
        self._coded, self._topology = coded, topology
        self._rank, self._applied = rank, applied

    def gather(self, communicator: Communicator) -> Mapping[str, Any] | None:
        """Return what all ranks have missed, by parameter and group, on rank 0."""
        feedbacks = [coded.feedback for coded in self._coded if coded.feedback is not None]
        held = [feedback.held(applied=self._applied) for feedback in feedbacks]
        flat = torch.cat(held) if held else torch.empty(0, dtype=torch.float32)
        what = "the gathering of what lossy wires missed, for which all ranks must come"
        device = self._coded[0].templates[0].device
        flats = [flat.cpu() for flat in gather_all(communicator, flat.to(device), what)]
        if communicator.rank > 0:
            return None
        groups = [self._assembled([flats[r] for r in group]) for group in self._topology.groups]
        return {"scale": feedbacks[0].scale, "missed": groups}

    scaled = True

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Go on from what this rank's group had missed, or of all groups' what it owns."""
        groups: Sequence[Mapping[str, Tensor]] = state["missed"]
        same = len(groups) == len(self._topology.groups)
        for coded in self._coded:
            if coded.feedback is None:
                continue
            own = self._topology.group_of(self._rank)
            flat = torch.zeros(coded.bucket_layout.numel, dtype=torch.float32)
            for name, view in coded.views(flat).items():
                for residual in [groups[own]] if same else groups:
                    if name in residual and residual[name].shape == view.shape:
                        view.add_(residual[name])
            coded.feedback.restore(flat, state["scale"], owned_by=None if same else own)
        return True

    def _assembled(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Put together what a group's ranks have missed, one flat tensor a rank."""
        places, found = [0] * len(flats), {}
        for coded in self._coded:
            bucket_layout = coded.bucket_layout
            flat = torch.empty(bucket_layout.numel, dtype=torch.float32)
            for local_shard in range(self._topology.local_shards):
                values = bucket_layout.local_shard(local_shard)
                start, places[local_shard] = (
                    places[local_shard],
                    places[local_shard] + len(flat[values]),
                )
                flat[values] = flats[local_shard][start : places[local_shard]]
            found.update(coded.views(flat))
        return found
