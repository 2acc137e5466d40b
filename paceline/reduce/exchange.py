"""The `Exchange` protocol: sums each bucket over the ranks, by whatever carries it.

    version = send(bucket)        the k-th exchange of a bucket is its version k, from 1
    sums = wait(bucket, version)

A rank sends a bucket's next version when it has waited for the last one: staleness 0, for which
one receive buffer a sender is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """Protocol of an exchange: sums each bucket of gradients or running statistics over the ranks.

    Attributes:
        zero_copy: whether gradients are read in place until their sums have arrived.
        traffic: the number of bytes that this rank sends and receives for each bucket in a step;
            where it differs from step to step, those of the last version that was waited for.
    """

    zero_copy: bool

    @property
    def traffic(self) -> Sequence[tuple[int, int]]: ...

    def begin(self, scale: float, indices: Sequence[int] | None = None) -> None:
        """Expect the buckets of a step whose loss is scaled; those before were waited for.

        Args:
            scale: of the loss.
            indices: the buckets that are sent next; None: all. Only puts exchange some of them.
        """

    def send(
        self, index: int, values: Sequence[Tensor | None], weight: float, operation: str
    ) -> int:
        """Start to sum a bucket; never block.

        Args:
            index: the bucket's number.
            values: one a parameter, None where there is none. With `zero_copy` they must not be
                written before `wait` has returned.
            weight: what they are multiplied by; with 0 they don't count, whatever they are.
            operation: names the bucket and the step in errors.

        Returns:
            the version, with which `wait` or `abandon` is called next.
        """

    def first_to_wait_for(self, index: int) -> int:
        """Return the bucket to wait for first on the way to bucket `index`, or `index` itself."""

    def wait(self, index: int, version: int) -> list[Tensor | None]:
        """Return a version's weighted sums, until the next `send`; None where no rank had values.

        Raises:
            CommError: a peer was lost, or a wait timed out.
            ConfigError: values were written since `send`.
        """

    def abandon(self, index: int, version: int | None) -> None:
        """Let a bucket's step leave no trace.

        Args:
            index: the bucket's number.
            version: what was sent and is still to be waited for; None if `wait` has returned it.

        Raises:
            CommError: a peer was lost, or a wait timed out.
        """

    def drain(self) -> None:
        """Return once the peers have all that they need of this rank, or within a limit."""

    def close(self) -> None:
        """Release what the exchange holds, without waiting for a peer."""
