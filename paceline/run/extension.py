"""Extensions: what else the steps of a run do; each is a class in a file of its own.

    begin_generation ─▶ begin_step ─ boundary ─ forward, after_forward ─ … ─ row ─▶ … ─▶
                             └ receive, act: the rows of earlier steps ◀─────┘
    ─▶ interrupt ─ leave_steps ─ settle ─ end_steps, epoch_fields ─ evaluation ─ end_epoch ─ save

The command alone calls `epoch_fields` and what follows it in the class. Two tables have
all extensions: `Session._extensions` those of each run, `_Recipe.extensions` the command's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from paceline.data.batch_slice import BatchSlice
from paceline.data.sample_maker import SampleMaker
from paceline.generation.summaries import StepSummary
from paceline.state.stateful import Restorable


class Extension:
    """Extension of a run's steps: a base whose methods, which all ranks call alike, do nothing."""

    def begin_generation(self) -> None:
        """Begin a generation's steps: ranks have other numbers, and the position may be earlier."""

    def begin_step(self, number: int) -> None:
        """Begin a step, before its boundary."""

    def row(self, batch: BatchSlice) -> Sequence[float]:
        """Return what this rank adds to a step's summary; as many numbers on all ranks."""
        return ()

    def receive(self, summary: StepSummary, row: Sequence[float]) -> None:
        """Take a step's summary, and the sum of the ranks' rows, as soon as this rank has them."""

    def act(self, summary: StepSummary, row: Sequence[float]) -> None:
        """Take the same again, at a boundary that is the same on all ranks."""

    def interrupt(self) -> None:
        """Note that something else than a step follows."""

    def leave_steps(self) -> None:
        """End an epoch's steps, before the waits that follow."""

    def end_steps(self, steps: int) -> None:
        """End an epoch's steps: the model has the weights after so many steps of the run."""

    def end_epoch(self) -> None:
        """Bring the position up to date before it is saved, after an epoch or for a stop."""

    def epoch_fields(self) -> Mapping[str, object]:
        """Return fields of the event `epoch`."""
        return {}

    def after_forward(self, steps: int) -> None:
        """Look at the model after a forward, which had the weights after so many steps."""

    def entries(self) -> Mapping[str, Restorable]:
        """Return what is saved and restored, by its entry in snapshots and checkpoints."""
        return {}

    def maker(self, maker: SampleMaker) -> SampleMaker:
        """Return what makes training samples."""
        return maker

    def criterion(self, criterion: nn.Module) -> nn.Module:
        """Return the loss of training samples."""
        return criterion

    def scored(self, labels: Tensor) -> Tensor:
        """Return the labels, (n,), by which training samples are scored."""
        return labels

    def evaluated(self, model: nn.Module) -> nn.Module:
        """Return the model that is evaluated and written."""
        return model
