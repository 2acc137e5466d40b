"""The `Synchronizer` protocol: sums travel during a step, updates enter before the next forward.

    begin ── forward ─────────────── backward ─────────────────── end ── next forward ──▶
             before_read(bucket)     gradient_ready(bucket)              before_read(bucket)

A result lands in staging memory and enters the parameters in `before_read` (or `settle`), after
this rank's own `end`. Nothing else in a step waits: there is no barrier. A synchronizer lives for
one generation of the world.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from paceline.reduce.buckets import Bucket
from paceline.reduce.rank_state import RankState


class Synchronizer(Protocol):
    """Protocol of gradient synchronization: the ranks' steps together equal one large-batch step.

    Attributes:
        buckets: the buckets of parameters whose gradients are exchanged.
        state: state that a checkpoint must save in addition to model and optimizer, or None; either
            all ranks have one or no rank does.
        waited: seconds that the caller's thread has waited for peers so far.
        immediate: whether `end` installs the step's result, for which no read then has to wait.
    """

    buckets: tuple[Bucket, ...]
    waited: float
    immediate: bool

    @property
    def state(self) -> RankState | None: ...

    def begin(self, step: int, weight: float, scale: float) -> None:
        """Start a step in which this rank's gradient counts with `weight`.

        Args:
            step: number of the step, the same on all ranks.
            weight: local samples / global samples, so that means over local slices add up to the
                mean over the global batch; 0 for a rank whose share is empty.
            scale: what the loss is multiplied by, the same on all ranks (loss scaling).
        """

    def before_read(self, bucket: Bucket) -> None:
        """Return once the bucket's parameters may be read; install what has arrived for them.

        Raises:
            PeerLost: a peer ended; CommTimeout: a wait timed out.
        """

    def gradient_ready(self, bucket: Bucket) -> None:
        """Start to send the bucket's gradients, which backward has completed; never block."""

    def complete(self) -> None:
        """Send what backward didn't reach, as `end` does; the last update is installed before.

        From now until `end` or `abandon`, the state is the one before this step's update.
        """

    def begin_again(self) -> None:
        """Begin another exchange of the step, whose first gradients were reduced."""

    def reduce(self) -> None:
        """Wait, and make every parameter's `.grad` the mean over the global batch.

        The caller may look at it, clip or unscale it; the update then uses it as it is.
        """

    def expose_gradients(self, parameter: Tensor) -> None:
        """Settle the last ended step, and make every `.grad` the mean over its global batch.

        Args:
            parameter: the one whose gradient is used.

        Raises:
            ConfigError: it isn't on this rank any more.
        """

    def end(self) -> None:
        """Freeze the step's hyperparameters; from now on its result may be installed."""

    def abandon(self) -> None:
        """End a step without an update (loss scaling skips one); all ranks do so or none."""

    def settle(self) -> None:
        """Make this rank's parameters and BatchNorm's running statistics final; local.

        It waits for what is under way, and starts nothing that other ranks must start too.
        """

    def install_statistics(self) -> None:
        """Install BatchNorm's running statistics of the last ended step; local, as `settle`."""

    def synchronize_replicas(self) -> None:
        """Settle, and make the replicas of all ranks equal; collective."""

    def wait_until_gradients_writable(self) -> None:
        """Return once the gradients of the last ended step may be written.

        Raises:
            PeerLost, CommTimeout: as `before_read`.
        """

    def drain(self) -> None:
        """Return once the peers have all that they need of this rank, or within a limit."""

    def close(self) -> None:
        """Release what the synchronizer holds, without waiting for a peer; it writes no more.

        `drain` precedes it at a good end; otherwise the peers lose this rank.
        """
