"""Adds up loss and accuracy over batches, on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOLD = 4  # sums of a batch
NO_TEST = {"test_accuracy": None, "top5": None}  # an epoch's event without an evaluation


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Mean loss and accuracies over samples; accuracies are in 0 to 1."""

    loss: float
    accuracy: float
    top5: float
    samples: int

    @property
    def of_training(self) -> dict[str, float]:
        """The fields of an epoch's event of training."""
        return {"samples": self.samples, "loss": self.loss, "accuracy": self.accuracy}

    @property
    def of_test(self) -> dict[str, float]:
        """The fields of an epoch's event of the evaluation."""
        return {"test_accuracy": self.accuracy, "top5": self.top5}


class ScoreCounter:
    """Accumulator of loss, correct predictions and samples of one rank.

    Args:
        sums: (4,) float64 to add to: loss times samples, right at first, right among five, samples.
            Sums of several ranks may be added.
    """

    def __init__(self, sums: Tensor) -> None:
        self.sums = sums

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, labels: Tensor, count: int) -> None:
        """Add a batch.

        Args:
            loss: scalar, the mean over the batch.
            logits: (batch, labels).
            labels: (batch,).
            count: how many samples of the batch are this rank's own; 0 for a borrowed one.
        """
        if count == 0:
            return
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (batch, ≤5)
        right = best == labels[:, None]
        self.sums[0] += loss.double() * count
        self.sums[1] += right[:, 0].sum()
        self.sums[2] += right.sum()
        self.sums[3] += count


def so_far(sums: Sequence[float]) -> tuple[float, float] | None:
    """Read loss and accuracy of an epoch that runs; None before anything is known."""
    loss, right, _, samples = sums[:TOLD]
    return (loss / samples, right / samples) if samples else None


def scores(sums: Sequence[float]) -> Scores:
    """Read sums, those of `ScoreCounter`, as means."""
    loss, top1, top5, samples = sums[:TOLD]
    return Scores(
        loss=loss / samples, accuracy=top1 / samples, top5=top5 / samples, samples=round(samples)
    )
