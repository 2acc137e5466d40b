"""Merged momenta: one entry of the optimizer's state of a bucket, averaged with its weights.

taken    this worker's values when the merge began; they travel themselves, unencoded
mean     that of all workers, weighted by samples

Steps that were made since then have multiplied the values by the decay and added what is new. The
result is what their gradients would have made of the mean:

    own = own + decay^steps * (mean - taken)

So what is never negative, such as Adam's squares, stays so.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.update.momenta import MomentumValues


class MergedMomenta:
    """Bucket of momenta that are merged by their mean; it has the interface of `MergedBucket`.

    Args:
        values: of the optimizer's state.
        flat: a tensor like their flat form, (values,).

    Attributes:
        taken: (values,), this worker's values when they were taken; read until they are summed.
        change: the same tensor, by the name under which `MergedBucket` sends: the values travel
            themselves, not a difference.
        outer: nothing.
    """

    def __init__(self, values: MomentumValues, flat: Tensor) -> None:
        self.values = values
        self.taken = self.change = torch.zeros_like(flat)
        self.outer: Mapping[str, Tensor] = {}

    def take(self) -> None:
        """Take the present values."""
        self.values.read(self.taken)

    def without_samples(self) -> Tensor:
        """Return what stands for the mean where no worker had samples: this worker's values."""
        return self.taken.clone()

    @torch.no_grad()
    def apply(self, sums: Tensor, *, steps: int, mix: float | None) -> None:
        """Merge.

        Args:
            sums: (values,), the weighted mean of the workers' values.
            steps: number of steps made since the values were taken.
            mix: of weights; of no meaning here.
        """
        merged = sums
        if steps:
            merged = torch.empty_like(self.taken)
            self.values.read(merged)
            merged.add_(sums - self.taken, alpha=self.values.decay**steps)
        self.values.write(merged)
