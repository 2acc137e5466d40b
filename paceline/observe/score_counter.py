"""Adds up loss and accuracy over batches, on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BATCH_SUMS = 4  # the number of sums of a batch


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Mean loss and accuracies over samples; accuracies are fractions from 0 to 1."""

    loss: float
    accuracy: float
    top5: float
    samples: int


@torch.no_grad()
def add_scores(sums: Tensor, loss: Tensor, logits: Tensor, labels: Tensor, count: int) -> None:
    """Add a batch of one rank.

    Args:
        sums: (4,) float64 to add to: loss times samples, right at first, right among five, samples.
            Sums of several ranks may be added.
        loss: scalar, the mean over the batch.
        logits: (batch, labels).
        labels: (batch,).
        count: how many samples of the batch are this rank's own; 0 for a placeholder.
    """
    if count == 0:
        return
    # A data set may have fewer than five labels.
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (batch, ≤5)
    right = best == labels[:, None]
    sums[0].add_(loss.double() * count)
    sums[1].add_(right[:, 0].sum())
    sums[2].add_(right.sum())
    sums[3].add_(count)


def scores(sums: Sequence[float]) -> Scores:
    """Read sums, those of `add_scores`, as means."""
    loss, top1, top5, samples = sums[:BATCH_SUMS]
    return Scores(
        loss=loss / samples, accuracy=top1 / samples, top5=top5 / samples, samples=round(samples)
    )
