"""Sums of a script's meters: of a step's values, and of an evaluation's."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.run.steps import Steps


class Meters:
    """Meters of a world: their sums over a step, and over an evaluation.

    Args:
        device: the device of the steps' sums.

    Attributes:
        count: the number of meters.
        names: the names of the sums of a step, those of each meter together.
        evaluation: the sums of the last evaluation, by the number of their meter and by name: this
            rank's, until they are merged.
        evaluating: whether an evaluation is in progress.
        merged: whether `evaluation` is of all ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.names: list[str] = []
        self._fixed = False  # a step has begun: the sums of the steps are these
        self.count = 0
        self._own: list[float] = []  # this rank's values of the step, that the host knows
        self._on_device: Tensor | None = None  # and those that the device computes
        self.evaluation: dict[tuple[int, str], float] = {}
        self.evaluating = False
        self.merged = True

    def add(self, names: Sequence[str]) -> int | None:
        """Count a meter; return the index of its first sum among those of a step.

        After the first step it is for evaluations only, and has no such index.
        """
        self.count += 1
        if self._fixed:
            return None
        self.names += names
        return len(self.names) - len(names)

    def begin(self, steps: Steps) -> None:
        """Let each step sum these meters, from the first one on."""
        if not self._fixed:
            self._fixed = True
            steps.sum_values(len(self.names))
            self.clear()

    def clear(self) -> None:
        """Forget what was added for a step that isn't made."""
        self._own = [0.0] * len(self.names)
        self._on_device = None

    def add_to_step(self, slot: int, value: float | Tensor) -> None:
        """Add a value of the step that is active, or comes next."""
        value = value.detach() if isinstance(value, Tensor) else value  # float() warns of a graph
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            self._own[slot] += float(value)
            return
        if self._on_device is None:
            size = len(self._own)
            self._on_device = torch.zeros(size, dtype=torch.float64, device=self._device)
        self._on_device[slot] += value.to(self._on_device)

    def take(self, sums: Tensor) -> None:
        """Move what was added to the sums of the step that ends: (values,) float64."""
        if any(self._own):
            sums += torch.tensor(self._own, dtype=torch.float64).to(sums.device)
        if self._on_device is not None:
            sums += self._on_device
        self.clear()

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Add values up for an evaluation that begins, as long as the block lasts."""
        self.evaluation = defaultdict(float)
        self.merged = False
        self.evaluating = True
        try:
            yield
        finally:
            self.evaluating = False

    def pack(self) -> bytes:
        """Return this rank's sums of the evaluation for `merge`."""
        return json.dumps([*self.evaluation.items()]).encode()

    def merge(self, parts: Sequence[bytes]) -> None:
        """Replace the evaluation's sums by those over all ranks.

        Args:
            parts: each rank's `pack`, in rank order.
        """
        self.evaluation = defaultdict(float)
        for part in parts:
            for (meter, name), value in json.loads(part):
                self.evaluation[meter, name] += value
        self.merged = True
