"""Breaks in the trainer's loop: a rank's generations end in mid-step, at moments of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import CommError
from paceline.replica.live_hooks import patch
from paceline.trainer import Trainer

MOMENTS = ("load", "forward", "backward", "update", "end", "evaluation")
Moment = tuple[int, str]  # a step's number or `ANY`, and when in it
ANY = -1


class Breaks:
    """Breaks in a trainer's loop: one moment for each generation but the last.

    Args:
        trainer: the trainer.
        moments: the moments.
        before: called at each, given the generation's number.
    """

    def __init__(
        self,
        trainer: Trainer,
        moments: Sequence[Moment],
        before: Callable[[int], None] = lambda generation: None,
    ) -> None:
        self._trainer, self._moments, self._before_break = trainer, moments, before
        self._before(trainer.train, "batch", "load")
        self._before(trainer.precision, "backward_and_update", "backward")
        self._after(trainer.precision, "backward_and_update", "end")
        self._before(trainer.optimizer, "zero_grad", "update")
        self._before(trainer.steps, "finish", "finish")
        self._before(trainer.replica, "state", "gathering")
        self._before(trainer.replica, "enter_generation", "entering")
        self._after(trainer.replica, "enter_generation", "entered")
        trainer.model.register_forward_pre_hook(self._forward)

    def pass_by(self, name: str) -> None:
        """Break off here, if this is the present generation's moment."""
        steps = self._trainer.steps
        moment = dict(enumerate(self._moments)).get(steps.generation)
        if name == "load" and moment == (steps.position.number, "between"):
            steps.take_snapshot()  # which all ranks then hold: none goes back further
            raise CommError(f"broken off before step {steps.position.number}")
        if moment in ((steps.position.number, name), (ANY, name)):
            self._before_break(steps.generation)
            raise CommError(f"broken off in step {steps.position.number}: {name}")

    def _forward(self, *_: object) -> None:
        self.pass_by("forward" if self._trainer.model.training else "evaluation")

    def _before(self, target: object, method: str, name: str) -> None:
        plain: Callable[..., Any] = getattr(target, method)

        def broken(_: object, *args: Any, **kwargs: Any) -> Any:
            self.pass_by(name)
            return plain(*args, **kwargs)

        patch(target, method, broken)

    def _after(self, target: object, method: str, name: str) -> None:
        plain: Callable[..., Any] = getattr(target, method)

        def broken(_: object, *args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            self.pass_by(name)
            return result

        patch(target, method, broken)


def drawn(seed: int, firsts: Sequence[int], ranks: int) -> list[list[Moment]]:
    """Draw for each generation, of each rank, a moment in one of two steps."""
    draw = random.Random(seed)
    return [
        [(first + draw.randrange(2), draw.choice(MOMENTS[:-1])) for _ in range(ranks)]
        for first in firsts
    ]
