"""Gradients that a script keeps after a step: in the next one, backward adds to them.

In plain torch `.grad` then is the sum over the steps since `zero_grad()`. Rank r has x_r of it, and
what the ranks send is weighted by their shares w_r of the next step. So where this rank's share
changes, it rescales what it keeps, and all ranks together send the sum of the means:

    sum_r w'_r (w_r / w'_r x_r + g_r) = sum_r w_r x_r + sum_r w'_r g_r

Gradients that were reduced are the mean on all ranks. They stay as they are, because the weights
add up to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket

Noted = dict[Tensor, tuple[ref[Tensor], int]]  # gradient and its count of writes, by parameter


class KeptGradients:
    """Gradients that this rank keeps after a step.

    Attributes:
        weight: what their sum over the ranks is weighted by; None if they are the mean.
        refused: by parameter, gradients to which backward mustn't add, with their counts of writes;
            empty as long as a script does nothing unusual.
        reason: why, a clause.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._parameters = [p for bucket in buckets for p in bucket.parameters]
        self._before: Noted | None = None  # before backward passes outside of a step
        self.weight: float | None = None
        self.refused: Noted = {}
        self.reason = ""

    def note(self) -> None:
        """Note what is kept, before backward passes outside of a step add to gradients."""
        if self._before is None:
            self._before = self._noted()

    @torch.no_grad()
    def rescale(self, weight: float) -> None:
        """Rescale what is kept for a step of another weight; nothing reads gradients now.

        Where it can't be rescaled, `refuse` raises if the script doesn't zero it.
        """
        assert self.weight is not None
        kept = self._noted() if self._before is None else self._before
        if not weight:
            reason = "in which this rank has no samples"
            self._refuse(kept, f"{reason}, so that its part of them would be lost")
            return
        same = [p for p, (gradient, _) in kept.items() if p.grad is gradient()]
        added = {p: kept[p] for p in same if p.grad is not None and p.grad._version > kept[p][1]}
        self._refuse(added, "in which this rank has another share of the samples")
        values = [p.grad for p in same if p not in added and p.grad is not None]
        if values:
            torch._foreach_mul_(values, self.weight / weight)

    def end(self, *, reduced: bool) -> None:
        """Take note that a step has ended; `reduced`: its gradients are the mean on all ranks."""
        self._before = None
        if self.refused:
            self.refused = {}
        if reduced:
            self.weight = None

    def expose(self) -> None:
        """Note that this rank alone may have the means."""
        self._refuse(self._noted(), "whose mean this rank has used after optimizer.step()")

    def require_unadded(self, bucket: Bucket, step: int) -> None:
        """Require that the bucket has no gradient that can't be sent.

        Raises:
            ConfigError: backward has added to it, or it stands for this rank's part; names it.
        """
        for p, name in zip(bucket.parameters, bucket.names, strict=True):
            gradient, version = self.refused.get(p, (None, 0))
            if gradient is None or p.grad is None or p.grad is not gradient():
                continue
            if p.grad._version > version or not self.weight:
                raise ConfigError(
                    f"the gradient of {name} is kept from an earlier step in step {step}, "
                    f"{self.reason}: call optimizer.zero_grad() in each step, or world.reduce() "
                    "before optimizer.step()."
                )

    def forget(self) -> None:
        """Forget all gradients that were noted: they are about to be zeroed."""
        self.refused, self._before = {}, None

    def _refuse(self, noted: Noted, reason: str) -> None:
        if noted:
            self.refused, self.reason = noted, reason

    def _noted(self) -> Noted:
        return {p: (ref(p.grad), p.grad._version) for p in self._parameters if p.grad is not None}
