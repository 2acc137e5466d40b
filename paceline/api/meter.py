"""`Meter`: sums over an epoch's steps, or an evaluation's samples, as if no rank had been lost.

    values of a step          travel with the step's summary, are summed over the ranks, and are a
                              part of the run's position, which goes back to a snapshot with it
    values of an evaluation   stay on their rank until the evaluation's end, where the ranks
                              exchange them once they have evaluated all samples

So a lost rank's values are known to the others, or its samples are trained or evaluated again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, SupportsFloat

import torch
from torch import Tensor

from paceline.errors import CommError, ConfigError
from paceline.run.steps import Steps

if TYPE_CHECKING:
    from paceline.api.script_loop import ScriptLoop


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


class Meter:
    """Meter: sums over the steps of an epoch, or over an evaluation; `World.meter` makes it.

    Args:
        meters: the world's meters.
        loop: the script's loop.
        names: the names of the sums.
    """

    def __init__(self, meters: Meters, loop: ScriptLoop, names: Sequence[str]) -> None:
        self._meters = meters
        self._loop = loop
        self._names = names
        self._number = meters.count
        self._first_slot = meters.add(names)
        self._of_evaluation: bool | None = None  # what it adds up; None: nothing yet

    def add(self, **values: float | Tensor) -> None:
        """Add this rank's values to the sums.

        Call it inside a step's block, or before it for a batch whose gradients the step
        accumulates; or inside a loop over `world.evaluation()`. Where a peer is lost in the step,
        the values don't count: the loader yields the batch again.

        Args:
            values: numbers, or tensors of one element, by the names of the sums; those of a GPU
                stay there until the step's end.

        Raises:
            ConfigError: there is no such sum, a value is no number, or neither a step nor an
                evaluation is active.
        """
        for name, value in values.items():
            if name not in self._names:
                raise ConfigError(
                    f"meter.add() got {name}=, but the meter has the sums "
                    f"{', '.join(self._names)}: name it in world.meter()."
                )
            if isinstance(value, Tensor):
                unfit = "" if value.numel() == 1 else f"of shape {tuple(value.shape)}"
            else:
                unfit = (
                    "" if isinstance(value, SupportsFloat) else f"of type {type(value).__name__}"
                )
            if unfit:
                raise ConfigError(
                    f"meter.add() got {name}= {unfit}: pass a number, or a tensor of one element."
                )
        loop = self._loop
        evaluating = self._meters.evaluating and not loop.in_step
        if not evaluating and loop.rollback.error is not None:
            return  # this step is made again
        if not evaluating and loop.in_step and not loop.collects:
            raise ConfigError(
                "meter.add() was called in a further step on the same batch: call it in the first "
                "step of each batch."
            )
        if not evaluating and not loop.collects:
            raise ConfigError(
                "meter.add() was called outside a step: call it inside `with world.step():`, so "
                "that the values are undone with the step where a rank is lost; or in a loop over "
                "world.evaluation(loader)."
            )
        if self._of_evaluation not in (None, evaluating):
            raise ConfigError(
                "meter.add() was called both in a step and in an evaluation: make a meter for each."
            )
        self._of_evaluation = evaluating
        for name, value in values.items():
            if evaluating:
                own = value.detach() if isinstance(value, Tensor) else value
                self._meters.evaluation[self._number, name] += float(own)
            else:
                self._meters.add_to_step(self._slot(name), value)

    def sums(self) -> Mapping[str, float]:
        """Return the sums over all ranks. All ranks call it, after the loop that adds.

        Of steps, they are those of the epoch, and begin anew with the loader's next iteration. Of
        an evaluation, they begin anew with the next one.

        Raises:
            ConfigError: a step is active, or the loop over the evaluation was left early.
            CommError: a peer is lost, and the run can't continue.
        """
        loop = self._loop
        if loop.in_step:
            raise ConfigError("meter.sums() was called inside a step: call it after the loop.")
        if self._first_slot is None or self._of_evaluation or self._evaluated:
            if not self._meters.merged:
                raise ConfigError(
                    "meter.sums() was called before the end of the loop over world.evaluation(): "
                    "iterate to its end on all ranks."
                )
            own = self._meters.evaluation
            return {name: own.get((self._number, name), 0.0) for name in self._names}
        steps = loop.require_steps("meter.sums()")
        try:
            steps.receive_sums()
        except CommError as error:
            loop.lose_between_steps(error)
        sums = steps.position.sums
        return {name: sums[self._slot(name)] if sums else 0.0 for name in self._names}

    @property
    def _evaluated(self) -> bool:
        """Whether another rank has added values to this meter in the last evaluation."""
        added = any(number == self._number for number, _ in self._meters.evaluation)
        return self._of_evaluation is None and added

    def _slot(self, name: str) -> int:
        """Return the index of a sum among those of a step."""
        if self._first_slot is None:
            raise ConfigError(
                "meter.add() was called in a step, but the meter was made after the first step: "
                "call world.meter() before the first step, on all ranks."
            )
        return self._first_slot + self._names.index(name)
