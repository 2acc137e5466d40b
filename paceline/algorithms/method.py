"""What a method is to those who make steps and save them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from paceline.algorithms.synchronizer import GradientAccess, GradientSynchronizer, Synchronizer
from paceline.errors import ServerLost
from paceline.reduce.rank_state import RankState


class Rounds(Protocol):
    """Rounds of a method that merges weights now and then; in between, ranks have their own.

    All but `written` are equal on all ranks.

    Attributes:
        last_round: the first step of the last completed round, and the step after its end; (0, 0)
            before there is one.
        ends: why the run ends once its state is saved, without another step; None: it continues.
        written: whether a script has written parameters between two steps, other than by a load.
    """

    last_round: tuple[int, int]
    ends: ServerLost | None
    written: bool

    @property
    def unmerged(self) -> bool:
        """Whether steps were made that the merged weights don't have yet."""

    def anchors(self) -> Mapping[str, Tensor]:
        """Return the parameters of the last merge by name, flat; views."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """Method by which ranks train one model, made for its buckets and for one generation.

    Attributes:
        synchronizer: synchronizes the steps.
        gradients: access to the exchanged gradients; None: gradients are local.
        state: what this rank alone has besides model and optimizer, or None; either all ranks have
            some or none does.
        immediate: whether a step's end installs its result, for which no read then has to wait.
        rounds: of a method that merges weights; None: weights are equal between two steps.
    """

    synchronizer: Synchronizer
    gradients: GradientAccess | None
    state: RankState | None = None
    immediate: bool = False
    rounds: Rounds | None = None

    @classmethod
    def by_gradients(cls, made: GradientSynchronizer) -> Self:
        """Return the method of a synchronizer that exchanges gradients."""
        return cls(synchronizer=made, gradients=made, state=made.state, immediate=made.immediate)
