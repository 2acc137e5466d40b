"""A net whose processes kill themselves: by local rank, each at a moment that its file names.

The file `deaths` has one line a rank, "RANK MOMENT COUNT": the process ends where the moment comes
for the COUNT-th time, a repeated step included.

    forward       of training
    backward      at its end, before the gradients are exchanged
    evaluation    the forward of an evaluation
    saving        a checkpoint's file is half written; on the leader
    snapshot      one between two steps begins, such as the run's first
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.cluster.environment import worker_environment
from paceline.replica.live_hooks import patch
from paceline.snapshots.step_snapshots import StepSnapshots
from tests.harness.processes.fault_runs import ObservedNet


class DyingNet(ObservedNet):
    """A net in float64 in a process that dies at its moment."""

    def __init__(self, num_labels: int) -> None:
        super().__init__(num_labels, torch.float64)
        environment = worker_environment()
        assert environment is not None
        self._passed: Counter[str] = Counter()
        self._death = deaths().get(environment.local_rank, ("never", 0))
        write = torch.save

        def save(_: object, state: Any, *words: Any, **options: Any) -> None:
            write(state, *words, **options)
            if isinstance(state, dict) and "paceline" in state:
                self._pass_by("saving")

        patch(torch, "save", save)
        take = StepSnapshots.take_between_steps

        def take_or_die(snapshots: StepSnapshots, *words: Any, **options: Any) -> None:
            self._pass_by("snapshot")
            take(snapshots, *words, **options)

        StepSnapshots.take_between_steps = take_or_die  # type: ignore[method-assign]

    def forward(self, images: Tensor) -> Tensor:
        self._pass_by("forward" if self.training else "evaluation")
        values = super().forward(images)
        if self.training:
            values.register_hook(lambda _: self._pass_by("backward"))
        return values

    def _pass_by(self, name: str) -> None:
        self._passed[name] += 1
        if (name, self._passed[name]) == self._death:
            os.kill(os.getpid(), signal.SIGKILL)


def dying(num_labels: int) -> nn.Module:
    """Make the net, for `--model`."""
    return DyingNet(num_labels)


def deaths() -> dict[int, tuple[str, int]]:
    """Read the moments, by local rank."""
    lines = [line.split() for line in Path("deaths").read_text().splitlines()]
    return {int(rank): (name, int(count)) for rank, name, count in lines}
