"""Curves of a run over its epochs, from its log, and what its event files add by rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from paceline.observe.event_file import find_event_files, read_events
from paceline.observe.run_summary import RunSummary, log_rows

_WAITS = ("wait_input_ms", "exposed_ms")


@dataclass(frozen=True, kw_only=True)
class RankWaits:
    """Waits of a rank, in ms a step: means of all steps that the rank has recorded."""

    input: float
    exchange: float


@dataclass(frozen=True, kw_only=True)
class WorkerLoss:
    """Loss of workers.

    Attributes:
        epoch: how many epochs were completed at the step from which the others continued.
        causes: why each was lost.
    """

    epoch: float
    causes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """Curves of a run.

    Attributes:
        summary: of the run.
        epochs: (rows,) how many epochs were completed at each row of the log.
        seconds: (rows,) the time until then, of all starts of the run.
        loss: (rows,) the mean training loss.
        accuracy: (rows,) the test accuracy, from 0 to 1; None: it wasn't tested.
        images_per_second: (rows,) over all machines.
        waits: of each rank of any generation.
        losses: the earliest first.
    """

    summary: RunSummary
    epochs: Sequence[int]
    seconds: Sequence[float]
    loss: Sequence[float]
    accuracy: Sequence[float | None]
    images_per_second: Sequence[float]
    waits: Mapping[int, RankWaits] = field(default_factory=dict)
    losses: Sequence[WorkerLoss] = ()

    @classmethod
    def of_folder(cls, folder: Path, summary: RunSummary) -> Self:
        """Read the curves of a run; empty ones where no epoch is complete.

        Raises:
            DataError: a file can't be read.
        """
        rows = log_rows(folder)
        accuracies = [float(row["test_accuracy"]) for row in rows]
        waits, losses = _of_events(folder)
        return cls(
            summary=summary,
            epochs=[int(row["epoch"]) + 1 for row in rows],
            seconds=[float(row["cumulative_time_spent"]) for row in rows],
            loss=[float(row["loss"]) for row in rows],
            accuracy=[None if value < 0 else value for value in accuracies],
            images_per_second=[float(row["inputs_per_sec"]) for row in rows],
            waits=waits,
            losses=losses,
        )

    def seconds_at(self, epoch: float) -> float:
        """Return the time after so many epochs, between those of two rows."""
        before = (0.0, 0.0)
        for after in zip(self.epochs, self.seconds, strict=True):
            if epoch <= after[0]:
                share = (epoch - before[0]) / (after[0] - before[0])
                return before[1] + share * (after[1] - before[1])
            before = after
        return before[1]


def _of_events(folder: Path) -> tuple[dict[int, RankWaits], list[WorkerLoss]]:
    """Read what the members' event files have: each rank's waits, and the losses of workers."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0] * (1 + len(_WAITS)))
    changes: dict[int, Mapping[str, Any]] = {}  # by generation: all members that are left have them
    steps = 0
    for _, path in find_event_files(folder):
        rank = 0
        for event in read_events(path):
            kind = event["event"]
            if kind == "run":
                rank = event["rank"]
                steps = event["steps"] or steps
            elif kind == "step" and "exposed_ms" in event:
                values = (1.0, *(event.get(name, 0.0) for name in _WAITS))
                sums[rank] = [old + new for old, new in zip(sums[rank], values, strict=True)]
            elif kind == "change":
                changes[event["generation"]] = event
    waits = {
        rank: RankWaits(input=waited / count, exchange=exposed / count)
        for rank, (count, waited, exposed) in sorted(sums.items())
    }
    losses = [
        WorkerLoss(epoch=change["start"] / steps, causes=tuple(filter(None, change["causes"])))
        for _, change in sorted(changes.items())
        if steps
    ]
    return waits, losses
