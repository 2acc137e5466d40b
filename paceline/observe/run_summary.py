"""Summary of a run, from what is in its folder: flags, progress, results, time."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from paceline.errors import DataError, Message
from paceline.observe.cost.cost import Cost
from paceline.observe.last_state import last_state


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Summary of a run.

    Attributes:
        run: the folder's name.
        flags: that identify it; {} of a script's run.
        finished: whether it came to its end.
        active: whether a process of it runs on this machine.
        steps: how many are completed.
        epochs: how many rows the log has; None without a log.
        loss: the mean training loss of the last epoch.
        accuracy: the best test accuracy of all epochs.
        seconds: the time of all epochs, evaluations included.
        cost: what it cost, of all its starts; None: it wasn't counted.
        images_per_second: over all machines, the mean of the epochs.
    """

    run: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = False
    active: bool = False
    steps: int = 0
    epochs: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    seconds: float | None = None
    images_per_second: float | None = None
    cost: Cost | None = None

    @classmethod
    def of_folder(
        cls, folder: Path, flags: Mapping[str, Any], *, finished: bool, active: bool
    ) -> Self:
        """Read the summary of a run.

        Args:
            folder: the run's.
            flags: its configuration.
            finished, active: as the attributes.

        Raises:
            DataError: a file can't be read.
        """
        try:
            last = last_state(folder)
            rows = log_rows(folder)
        except OSError as error:
            raise DataError(
                Message(
                    "{} can't be read ({}); run this as the run's user.", folder, error.strerror
                )
            ) from error
        known: dict[str, Any] = {}
        if rows:
            tested = [value for row in rows if (value := float(row["test_accuracy"])) >= 0]
            seconds = sum(float(row["time_spent"]) for row in rows)
            images = float(rows[-1]["cumulative_input_count"]) if seconds else 0.0
            known = {
                "loss": float(rows[-1]["loss"]),
                "accuracy": max(tested, default=None),
                "seconds": seconds,
                "images_per_second": images / seconds if seconds else None,
            }
        return cls(
            run=folder.name,
            flags=flags,
            finished=finished,
            active=active,
            steps=last.steps,
            cost=last.cost,
            epochs=len(rows) if rows else None,
            **known,
        )

    @property
    def is_of_command(self) -> bool:
        """Whether `paceline train` has trained it; else a script has."""
        return "num_epochs" in self.flags

    @property
    def state(self) -> str:
        """Whether it is finished, active, or where it stopped."""
        if self.active:
            return f"active, step {self.steps:,}"
        return "finished" if self.finished else f"stopped, step {self.steps:,}"

    def as_json(self) -> dict[str, Any]:
        """Return all values by name."""
        return {**asdict(self), "state": self.state}


def log_rows(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a run's log, the newest one of each epoch."""
    rows: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("*.log"), key=lambda one: one.stat().st_mtime):
        with path.open(newline="") as file:
            next(file, None)  # the flags
            for row in csv.DictReader(file):
                rows[row["epoch"]] = row
    return [rows[epoch] for epoch in sorted(rows, key=int)]
