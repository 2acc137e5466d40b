"""Undisturbed trainings by the trainer, each made once, with which broken-off ones are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from tests.harness.equivalence.trainer_rollbacks import TrainerRollbacks


@dataclass(frozen=True)
class Undisturbed:
    """Result of a training: each rank's weights, and the rows of the CSV log."""

    states: list[Mapping[str, Tensor]]
    rows: list[dict[str, str]]


@cache
def undisturbed(flags: tuple[str, ...], machines: tuple[int, ...]) -> Undisturbed:
    """Train with these flags of `paceline train`, and so many members on each machine."""
    with TemporaryDirectory() as folder:
        run = TrainerRollbacks(Path(folder) / "plain", flags, machines)
        return Undisturbed(run.run(), run.rows)
