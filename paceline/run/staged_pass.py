"""Pass of a batch through the stages of a model, with the scores of its microbatches.

Logits are on the last stage alone: its loss function adds the scores up, and its rank reports them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.data.loader import Batch
from paceline.errors import CommError
from paceline.models.output_check import check_output, explained_errors
from paceline.observe.score_counter import BATCH_SUMS, add_scores
from paceline.parallel.stage import Stage
from paceline.replica.replica import Replica
from paceline.run.precision import Precision


@dataclass(kw_only=True, eq=False)
class StagedPass:
    """Forward and backward of batches through all stages, as this rank runs them.

    Attributes:
        criterion: the loss.
        precision: computes in the type that is asked for.
        num_labels: classes.
        microbatches: into how many a batch is cut.
        counts: whether this rank reports the scores: it has the last stage.
        stage: this rank's, which is made with `loss`.
        replica: exchanges the stage's gradients, once it is bound.
    """

    criterion: nn.Module
    precision: Precision
    num_labels: int
    microbatches: int
    counts: bool
    stage: Stage = field(init=False)
    replica: Replica = field(init=False)
    _sums: list[Tensor] = field(default_factory=list)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients inside."""
        return self.replica.no_sync()

    def lose(self, error: CommError) -> None:
        """Raise the error: `Steps.run_generations` goes back."""
        raise error

    def loss(self, output: object, labels: Tensor) -> Tensor:
        """Return the mean loss of a microbatch, and add up its scores."""
        logits = check_output(output, self.num_labels, len(labels))
        loss: Tensor = self.criterion(logits, labels)
        sums = torch.zeros(BATCH_SUMS, dtype=torch.float64, device=labels.device)
        add_scores(sums, loss.detach(), logits.detach(), labels, len(labels))
        self._sums.append(sums)
        return loss

    def train(self, batch: Batch, sums: Tensor) -> None:
        """Run forward and backward of a batch, and add up its scores, those of `add_scores`."""
        self._sums.clear()
        with self.precision.forward(), explained_errors(batch.images):
            self.stage.train_batch(batch.images, batch.labels)
        if self._sums and batch.place.count:  # a placeholder counts nothing
            sums += torch.stack(self._sums).sum(0)
