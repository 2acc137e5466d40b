"""`Position`: how far a run is, in epochs and steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Position:
    """Position of a run: epoch, step and accumulated sums.

    Attributes:
        step: number of completed steps in the epoch.
        number: number of completed steps in the run.
        sums: sums over the epoch's completed steps and all ranks.
        best: the best test accuracy of all completed epochs; None if there is none.
        best_epoch: the number of the epoch that has it.
        shares: where the ranks' shares of the global batch follow their speeds: the present ones,
            and those that are planned, each as (number of the first step, samples by rank).
        decode_device: the device that decodes images, where it was chosen by measurement; empty: it
            isn't chosen yet, or the user has named it.
        min_slice: the smallest number of samples of a slice that isn't empty (`small_slices`).
        usage: what each start of a machine, and each GPU, has used since then (`run/run_cost.py`).
        snapshot_interval: the interval between in-memory snapshots, in steps; 0: not measured yet.
    """

    epoch: int = 0
    step: int = 0
    number: int = 0
    sums: list[float] = field(default_factory=list)
    best: float | None = None
    best_epoch: int | None = None
    snapshot_interval: int = 0
    decode_device: str = ""
    min_slice: int = 1
    shares: list[tuple[int, list[int]]] = field(default_factory=list)
    usage: dict[str, list[float | None]] = field(default_factory=dict)

    def set(self, values: Mapping[str, Any]) -> None:
        """Replace the values of these fields."""
        for name, value in values.items():
            setattr(self, name, value)
