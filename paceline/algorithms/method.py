"""Method: a model's synchronizer in one generation, with its gradients, rank state and rounds.

    MethodBuilder.plan      which buckets: when a generation begins, and before each step
    MethodBuilder.method    makes the method for these buckets

A replica asks its builder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from paceline.algorithms.average import Averaging
from paceline.algorithms.synchronizer import GradientAccess, GradientSynchronizer, Synchronizer
from paceline.generation.context import GenerationContext
from paceline.reduce.buckets import Bucket
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


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Bucket plan: how the trained parameters are divided into buckets.

    Attributes:
        bucket_bytes: approximate size of a bucket in bytes.
        dense: gradients don't travel, so a parameter with row-sparse ones is in a common bucket.
    """

    bucket_bytes: int
    dense: bool = False


class MethodBuilder(Protocol):
    """Protocol of a builder of methods, one after another, for one model and its optimizer.

    Attributes:
        changes: whether another method may continue within a generation; else `plan` is asked only
            when one begins.
    """

    changes: bool

    def plan(self, *, begins: bool) -> BucketPlan | None:
        """Decide on the method from the next step on; collective, and the same on all ranks.

        Args:
            begins: a generation begins, so there is no present method.

        Returns:
            the buckets that `method` will get; None: the present method continues.
        """

    def method(self, buckets: Sequence[Bucket], context: GenerationContext) -> Method:
        """Make the method of the last plan; collective, and again where other layers are trained.

        Args:
            buckets: of the trained parameters.
            context: the present generation's.

        Raises:
            ConfigError: the parameters can't be exchanged so.
        """
