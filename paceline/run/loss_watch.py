"""Check of each step's loss: records it, and ends a run that diverges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import Diverged
from paceline.generation.run import Run
from paceline.generation.summaries import StepSummary
from paceline.run.extension import Extension
from paceline.state.checkpoint_files import FOLDER

# In a row: 2^16, the scale that float16's loss scaling starts from, halved 40 times is below 1e-7.
_SKIPPED = 40


class LossWatch(Extension):
    """Loss watch: checks each step's loss over all ranks, and raises if the run diverges.

    Args:
        run: the run, whose recorder receives one `loss` event per step, on rank 0.
        max_loss: the largest accepted loss; 0: any finite loss is accepted.
        every: number of steps between comparisons with `max_loss`.
        folder: of the run.
    """

    def __init__(self, run: Run, *, max_loss: float, folder: Path, every: int = 1) -> None:
        self._run = run
        self._max_loss = max_loss
        self._remedy = (
            "Use a smaller --base_learning_rate or add --warmup_epochs; the checkpoints in "
            f"{folder / FOLDER} are valid."
        )
        self._every = every
        self._skipped = 0

    def receive(self, summary: StepSummary, row: Sequence[float]) -> None:
        """Check the loss of a step.

        Args:
            summary: with the sums: loss times samples, …, samples, ranks that skipped the update
                because float16 overflowed.
            row: empty.

        Raises:
            Diverged: the loss isn't a number or too large, or every update overflows.
        """
        step = summary.step
        total, _, _, samples, skipped = summary.sums
        loss = total / samples if samples else 0.0
        if self._run.leads:
            generation = self._run.context.world.generation.number
            self._run.recorder.event("loss", generation=generation, step=step, loss=loss)
        self._skipped = self._skipped + 1 if skipped else 0
        if self._skipped > _SKIPPED:
            raise Diverged(
                f"The gradients overflowed float16 in {self._skipped} consecutive steps, up to "
                f"step {step}. {self._remedy}"
            )
        if skipped:
            return
        # After `skipped`: an overflow that loss scaling skips is one of its ordinary steps.
        if not math.isfinite(loss):
            raise Diverged(
                f"The loss became {'NaN' if math.isnan(loss) else 'infinite'} in step {step}. "
                f"{self._remedy}"
            )
        if 0 < self._max_loss < loss and (step + 1) % self._every == 0:
            raise Diverged(
                f"The loss became {loss:.4g} in step {step}; --max_loss is {self._max_loss:g}. "
                f"{self._remedy}"
            )
