"""The exchange: adds up what the ranks have of each bucket, whatever carries it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """Adds up what ranks have of each run: a bucket's gradients, or the running statistics.

    Attributes:
        zero_copy: values are read where they lie until their sums have come.
    """

    zero_copy: bool

    def steady(self) -> None:
        """End the start-up: all ranks have exchanged a step, and are waited for less long."""

    def begin(self, *, applied: bool, scale: float) -> None:
        """Expect all runs of a step; those of the step before have been waited for.

        Args:
            applied: the step before took effect; otherwise it leaves no trace.
            scale: what this step's loss is multiplied by.
        """

    def send(self, index: int, values: Sequence[Tensor | None], weight: float) -> None:
        """Start to add a run up; never block.

        Args:
            index: the run's number.
            values: one a parameter, not to be written before `wait` if the exchange is `zero_copy`;
                None
                where there is none.
            weight: what they count; with 0 they don't count whatever they are.
        """

    def traffic(self, index: int) -> tuple[int, int]:
        """Return the bytes that this rank sends and receives for a run in a step."""

    def next(self, index: int) -> int:
        """Return the run to wait for first by one who needs run `index`: itself, if it is there."""

    def wait(self, index: int, operation: str) -> list[Tensor | None]:
        """Return a run's weighted sums, until the next `send`; None where no rank had values.

        Raises:
            CommError: a peer was lost, or silent.
            ConfigError: values were written since `send`.
        """

    def discard(self, index: int, operation: str) -> None:
        """Wait for a run's sums, and forget them: the values may have been written since `send`.

        Raises:
            CommError: a peer was lost, or silent.
        """

    def drain(self) -> None:
        """Return once the peers have all that they need of this rank, or within a limit."""

    def close(self) -> None:
        """Release what the exchange holds, and wait for nobody."""
