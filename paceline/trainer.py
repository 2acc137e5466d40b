"""The loop: epochs of steps, each with an evaluation, a row of the CSV log, and the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.comm.communicator import total
from paceline.data.loader import Batch
from paceline.errors import many
from paceline.models.output_check import explained_memory
from paceline.observe.score_counter import BATCH_SUMS, Scores, add_scores, scores
from paceline.replica.replica import Replica
from paceline.run.batches import Batches
from paceline.run.convergence import Convergence
from paceline.run.extension import Extension
from paceline.run.precision import Precision
from paceline.run.predictor import EvaluationSums, Predictor, evaluated
from paceline.run.staged_pass import StagedPass
from paceline.run.steps import Steps
from paceline.state.weights import save_epoch


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Training loop, and the components that it uses; `folder` gets the weights of each epoch.

    `about` describes the model in the files of its weights.
    `convergence` ends it before the last of its `epochs`. `fixed` are modules that compute as in an
    evaluation while the others train. `evaluated` is the model that is evaluated and written, and
    `training_criterion` the loss of training samples, where `extensions` give others.
    `staged` trains the batches of a model that is a pipeline's stage; None: it is whole.
    """

    model: nn.Module
    evaluated: nn.Module
    criterion: nn.Module
    training_criterion: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    precision: Precision
    replica: Replica
    steps: Steps
    train: Batches
    test: Batches | None
    folder: Path
    weights_name: str
    about: Mapping[str, Any]
    epochs: int
    num_labels: int
    convergence: Convergence
    fixed: tuple[nn.Module, ...] = ()
    extensions: Sequence[Extension] = ()
    staged: StagedPass | None = None

    @cached_property
    def predictor(self) -> Predictor:
        """The model's forward pass."""
        return Predictor(model=self.model, precision=self.precision, num_labels=self.num_labels)

    def run(self) -> None:
        """Train to the end, or raise `Stop`; a failure of data, peers or disk is a sentence."""
        with explained_memory():
            self.steps.run_generations(self._run_epochs)

    def _run_epochs(self) -> None:
        if self.steps.recovery.went_back and self.steps.position.step == 0:
            position = self.steps.position
            # The leader may have been lost before it saved the epoch.
            self._save_weights(position.best_epoch == position.epoch - 1)
            self.steps.save()
        for epoch in range(self.steps.position.epoch, self.epochs):
            if reason := self.convergence.reason(self.steps.position):
                self.steps.run.note(f"The run ends after {many(epoch, 'epoch')}: {reason}.")
                break
            self._run_epoch(epoch)
        self.steps.finish(together=True)

    def _run_epoch(self, epoch: int) -> None:
        timeline = self.steps.run.timeline
        started = timeline.now()
        rate = self.schedule.get_last_lr()[0]
        trained = self._train_epoch(epoch)
        waiting = self.train.end_epoch(timeline.now() - started)
        fields = self.steps.epoch_fields()
        tested = self._evaluate(epoch) if self.test is not None else None
        self.steps.run.recorder.event(
            "epoch",
            epoch=epoch,
            seconds=timeline.now() - started,
            batches=self.train.steps,
            learning_rate=rate,
            wait_input=waiting,
            **fields,
            samples=trained.samples,
            loss=trained.loss,
            accuracy=trained.accuracy,
            test_loss=tested.loss if tested else None,
            test_accuracy=tested.accuracy if tested else None,
            top5=tested.top5 if tested else None,
        )
        accuracy = tested.accuracy if tested else None
        self._save_weights(self.steps.improves(accuracy))
        self.steps.end_epoch(accuracy)

    def _save_weights(self, best: bool) -> None:
        leads = self.steps.run.leads
        state: Mapping[str, Any] = {}
        if self.staged is None:
            state = self.evaluated.state_dict() if leads else {}
        elif self.steps.run.context.writes:  # of one replica, all stages have a part
            state = self.staged.stage.whole_state_dict(on_all=False)
        if leads:
            _, workers = self.steps.run.rank_and_size()
            about = {**self.about, "workers": workers, "threads": torch.get_num_threads()}
            save_epoch(self.folder, self.weights_name, state, about, best=best)

    def _train_epoch(self, epoch: int) -> Scores:
        self.model.train()
        for module in self.fixed:
            module.eval()
        for step in range(self.steps.position.step, self.train.steps):
            self._train_step(self.train.batch(epoch, step))
        return scores(self.steps.end_steps(merge=epoch + 1 == self.epochs))

    def _train_step(self, batch: Batch) -> None:
        rate = self.schedule.get_last_lr()[0]
        order = self.train.loader.order
        sums = self.steps.begin(batch.place)
        parts = 1 if self.staged is None else self.staged.microbatches
        with self.train.small.in_step([self.model], order, -(-len(batch.images) // parts)):
            updated = self._pass(batch, sums[:BATCH_SUMS])
            sums[BATCH_SUMS].fill_(not updated)  # assigned, it would be copied from the host
        counts = None if self.staged is None else self.staged.counts
        self.steps.end(sums, counts=counts, learning_rate=rate)
        self.schedule.step()

    def _pass(self, batch: Batch, sums: Tensor) -> bool:
        """Run forward, backward and the update; return whether there was one."""
        if self.staged is not None:
            self.staged.train(batch, sums)
            return self.precision.update(self.replica, self.optimizer)
        logits = self.predictor.logits(batch.images)
        for extension in self.extensions:
            extension.after_forward(self.schedule.last_epoch)
        loss = self.predictor.loss(self.training_criterion, logits, batch.labels)
        updated = self.precision.backward_and_update(loss, self.replica, self.optimizer)
        labels = batch.labels
        for extension in self.extensions:
            labels = extension.scored(labels)
        add_scores(sums, loss.detach(), logits.detach(), labels, batch.place.count)
        return updated

    def _evaluate(self, epoch: int) -> Scores:
        assert self.test is not None
        run = self.steps.run
        self.model.eval()
        _, workers = run.rank_and_size()
        predictor = replace(self.predictor, model=self.evaluated)
        sums = EvaluationSums(predictor, self.criterion, workers, run.context.device)
        for step in range(self.test.steps):
            sums.add(self.test.batch(epoch, step))
            run.recorder.event("evaluate", step=step, steps=self.test.steps)
        what = "the sums of an evaluation"
        return evaluated(total(run.context.group("data", "steps"), sums.rows, what))
