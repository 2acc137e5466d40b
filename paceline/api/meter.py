"""`Meter`: sums over an epoch's steps, or an evaluation's samples, as if no rank had been lost.

    values of a step          travel with the step's summary, are summed over the ranks, and are a
                              part of the run's position, which goes back to a snapshot with it
    values of an evaluation   stay on their rank until the evaluation's end, where the ranks
                              exchange them once they have evaluated all samples

So a lost rank's values are known to the others, or its samples are trained or evaluated again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import SupportsFloat

from torch import Tensor

from paceline.api.meters import Meters
from paceline.api.script_loop import ScriptLoop
from paceline.errors import CommError, ConfigError


class Meter:
    """Meter: sums over the steps of an epoch, or over an evaluation; `World.meter` makes it.

    Args:
        meters: the world's meters.
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
