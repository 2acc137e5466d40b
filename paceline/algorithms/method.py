"""Method: a model's synchronizer in one generation, with its gradients, rank state and rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from paceline.algorithms.average import Averaging
from paceline.algorithms.synchronizer import GradientAccess, GradientSynchronizer, Synchronizer
from paceline.reduce.rank_state import RankState


@dataclass(frozen=True, kw_only=True)
class Method:
    """Method by which ranks train one model, made for its buckets and for one generation.

    Attributes:
        synchronizer: synchronizes the steps.
        gradients: access to the exchanged gradients; None: gradients are local.
        state: what this rank alone has of the exchange, or None; either all ranks have some or none
            does.
        immediate: whether a step's end installs its result, for which no read then has to wait.
        rounds: merges the weights now and then; None: they are equal between two steps.
    """

    synchronizer: Synchronizer
    gradients: GradientAccess | None
    state: RankState | None = None
    immediate: bool = False
    rounds: Averaging | None = None

    @classmethod
    def by_gradients(cls, made: GradientSynchronizer) -> Self:
        """Return the method of a synchronizer that exchanges gradients."""
        return cls(synchronizer=made, gradients=made, state=made.state, immediate=made.immediate)

    @classmethod
    def by_rounds(cls, made: Averaging) -> Self:
        """Return the method of merging weights."""
        return cls(synchronizer=made, gradients=None, rounds=made)
