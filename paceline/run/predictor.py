"""Forward pass of a classifier, and the scores of its evaluation: the trainer's and a command's.

    batch slices of an evaluation ──▶ logits ──▶ a row of sums for each rank ──▶ sum in rank order

A command that evaluates with the run's slices, precision and threads has the trainer's scores, bit
for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.data.loader import Batch
from paceline.models.output_check import check_output, explained_errors
from paceline.observe.score_counter import BATCH_SUMS, Scores, add_scores, scores
from paceline.run.precision import Precision


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Forward pass of a model that classifies images.

    Attributes:
        precision: computes in the type that is asked for.
        num_labels: classes.
    """

    model: nn.Module
    precision: Precision
    num_labels: int

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits of images, (n, num_labels).

        Args:
            images: normalised, (n, channels, image_size, image_size), on the model's device.

        Raises:
            ConfigError: the model fails, or returns something else.
        """
        with self.precision.forward(), explained_errors(images):
            return check_output(self.model(images), self.num_labels, len(images))

    def loss(self, criterion: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of logits, in the same precision."""
        with self.precision.forward():
            loss: Tensor = criterion(logits, labels)
            return loss


class EvaluationSums:
    """Sums of an evaluation's scores, a row for each rank.

    Args:
        predictor: the model, in evaluation mode.
        criterion: the loss.
        workers: the ranks that divide each batch.
        device: the model's.
    """

    def __init__(
        self, predictor: Predictor, criterion: nn.Module, workers: int, device: torch.device
    ) -> None:
        self.rows = torch.zeros(workers, BATCH_SUMS, dtype=torch.float64, device=device)
        self._predictor = predictor
        self._criterion = criterion

    @torch.no_grad()
    def add(self, batch: Batch) -> Tensor:
        """Add the scores of a rank's slice, a placeholder's not; return its logits."""
        logits = self._predictor.logits(batch.images)
        loss = self._predictor.loss(self._criterion, logits, batch.labels)
        place = batch.place
        add_scores(self.rows[place.rank], loss, logits, batch.labels, place.count)
        return logits


def evaluated(rows: Tensor) -> Scores:
    """Return the scores of all ranks' rows, (ranks, BATCH_SUMS), summed in rank order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return scores(total.tolist())
