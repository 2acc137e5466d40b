"""The loop: epochs of steps, each followed by an evaluation, a row of the log and the weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.comm.communicator import Communicator, total
from paceline.data.loader import Batch, Loader
from paceline.observe.tally import NO_TEST, Scores, Tally, scores
from paceline.recorder import Recorder
from paceline.sync.precision import Precision
from paceline.sync.replica import Replica


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A run's parts, all built."""

    model: nn.Module
    criterion: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    precision: Precision
    replica: Replica
    communicator: Communicator
    device: torch.device
    train: Loader
    test: Loader | None
    recorder: Recorder
    save: Callable[[], None]
    epochs: int
    generation: int

    def run(self) -> None:
        """Train to the end; a failure of data, peers or disk is a `PacelineError`."""
        for epoch in range(self.epochs):
            started, rate = time.perf_counter(), self.schedule.get_last_lr()[0]
            trained = self._train_epoch(epoch)
            tested = self._evaluate(epoch) if self.test is not None else None
            self.replica.settle()
            self.recorder.event(
                "epoch",
                epoch=epoch,
                seconds=time.perf_counter() - started,
                batches=self.train.steps,
                learning_rate=rate,
                **trained.of_training,
                **(tested.of_test if tested else NO_TEST),
            )
            self.save()

    def _train_epoch(self, epoch: int) -> Scores:
        self.model.train()
        tally = Tally(self.device)
        for step in range(self.train.steps):
            batch = self.train.batch(epoch, step)
            rate = self.schedule.get_last_lr()[0]
            self._train_step(batch, tally)
            self.recorder.event(
                "step",
                **batch.place,
                **tally.means,
                generation=self.generation,
                step=epoch * self.train.steps + step,
                steps=self.train.steps,
                learning_rate=rate,
            )
        return scores(total(self.communicator, tally.sums, f"the sums of epoch {epoch}"))

    def _train_step(self, batch: Batch, tally: Tally) -> None:
        with self.replica.step(batch.epoch * self.train.steps + batch.step, batch.weight):
            logits, loss = self._predict(batch)
            self.precision.backward_and_update(loss, self.replica, self.optimizer)
        self.schedule.step()
        tally.add(loss.detach(), logits.detach(), batch.labels, batch.count)

    def _predict(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with self.precision.forward():
            logits = self.model(batch.images)
            return logits, self.criterion(logits, batch.labels)

    @torch.no_grad()
    def _evaluate(self, epoch: int) -> Scores:
        assert self.test is not None
        self.model.eval()
        tally = Tally(self.device)
        for step in range(self.test.steps):
            batch = self.test.batch(epoch, step)
            logits, loss = self._predict(batch)
            tally.add(loss, logits, batch.labels, batch.count)
            self.recorder.event("evaluate", step=step, steps=self.test.steps)
        return scores(total(self.communicator, tally.sums, "the sums of an evaluation"))
