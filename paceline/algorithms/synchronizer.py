"""The `Synchronizer` protocol: sums travel during a step, updates enter before the next forward.

    begin ── forward ─────────────── backward ─────────────────── end ── next forward ──▶
             before_read(bucket)     gradient_ready(bucket)              before_read(bucket)

A result lands in staging memory and enters the parameters in `before_read` (or `settle`), after
this rank's own `end`. Nothing else in a step waits: there is no barrier. A synchronizer lives for
one generation of the world.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum, auto
from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.reduce.buckets import Bucket
from paceline.reduce.rank_state import RankState

STATISTICS = Bucket(index=-1, param_group=-1, parameters=(), names=("the running statistics",))
"""What `before_read` gets for BatchNorm's running statistics, which no parameter's bucket has."""


class StepInfo(NamedTuple):
    """What a synchronizer gets to know of a step.

    Attributes:
        number: of the step, the same on all ranks.
        weight: local samples / global samples, so that means over local slices add up to the mean
            over the global batch; 0 for a rank whose share is empty.
        samples: of all ranks.
        scale: what the loss is multiplied by, the same on all ranks (loss scaling).
    """

    number: int
    weight: float
    samples: int = 1
    scale: float = 1.0


class Weights(Enum):
    """Weights that a model has once it is settled.

    Attributes:
        OWN: this rank's, after the last step; local.
        EQUAL: those that all ranks have alike; local. Averaged ones are those of the last merge.
        MERGED: those that have all ranks' steps; collective.
    """

    OWN = auto()
    EQUAL = auto()
    MERGED = auto()


class Synchronizer(Protocol):
    """Protocol of synchronization: the ranks' steps together train one model."""

    def begin(self, step: StepInfo) -> None:
        """Start a step."""

    def before_read(self, bucket: Bucket) -> None:
        """Return once the bucket's parameters may be read; install what has arrived for them.

        Args:
            bucket: of parameters; or `STATISTICS`.

        Raises:
            PeerLost: a peer ended; CommTimeout: a wait timed out.
        """

    def gradient_ready(self, bucket: Bucket) -> None:
        """Start to send the bucket's gradients, which backward has completed; never block."""

    def end(self, *, update: bool) -> None:
        """End the step: freeze its hyperparameters; from now on its result may be installed.

        Args:
            update: an optimizer has stepped. Otherwise (loss scaling skips one) the gradients are
                dropped; all ranks do so or none.
        """

    def settle(self, weights: Weights = Weights.OWN) -> None:
        """Make this rank's parameters and BatchNorm's running statistics final.

        It waits for what is under way; but for `MERGED`, it starts nothing that other ranks must
        start too.
        """

    def close(self, *, drain: bool = False) -> None:
        """Release what the synchronizer holds; it writes no more. May be called again.

        Args:
            drain: first wait until the peers have all that they need of this rank, or for a limit.
                Without it, no peer is waited for, and the peers lose this rank.
        """


class GradientAccess(Protocol):
    """Protocol of gradients that are exchanged in a step, as a script may use them meanwhile.

    Attributes:
        reads: None where all ranks read the same parameters in a step. Otherwise they are equal
            once all have settled between the same steps, and this is how often a bucket was read
            whose version was so many behind, by this number.
    """

    reads: Counter[int] | None

    def complete(self) -> None:
        """Send what backward didn't reach, as `end` does; the last update is installed before.

        From now until `end`, the state is the one before this step's update.
        """

    def reduce(self) -> None:
        """Wait, and make every parameter's `.grad` the mean over the global batch.

        The caller may look at it, clip or unscale it; the update then uses it as it is.
        """

    def begin_again(self) -> None:
        """Begin another exchange of the step, whose first gradients were reduced."""

    def expose(self, parameter: Tensor) -> None:
        """Settle the last ended step, and make every `.grad` the mean over its global batch.

        Args:
            parameter: the one whose gradient is used.

        Raises:
            ConfigError: it isn't on this rank any more.
        """

    def wait_writable(self) -> None:
        """Return once the gradients of the last ended step may be written.

        Raises:
            PeerLost, CommTimeout: as `Synchronizer.before_read`.
        """


class GradientSynchronizer(Synchronizer, GradientAccess, Protocol):
    """Protocol of gradient synchronization: the steps together equal one large-batch step.

    Attributes:
        state: state that a checkpoint must save in addition to model and optimizer, or None; either
            all ranks have one or no rank does.
        immediate: whether `end` installs the step's result, for which no read then has to wait.
    """

    immediate: bool

    @property
    def state(self) -> RankState | None: ...
