"""Exchange of a world of one rank: a sum is its only summand, read where backward left it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class NoExchange:
    """Exchange of a world of one rank, which sends nothing and waits for nothing.

    Gradients are multiplied only where the weight isn't 1: where samples of the step's batch
    couldn't be read.
    """

    zero_copy = True

    def __init__(self, buckets: int) -> None:
        self.traffic = [(0, 0)] * buckets
        self._sums: dict[int, list[Tensor | None]] = {}

    def begin(self, scale: float, indices: Sequence[int] | None = None) -> None:
        """Do nothing: no residuals are left."""

    def send(
        self, index: int, values: Sequence[Tensor | None], weight: float, operation: str
    ) -> int:
        """Weigh the bucket's gradients; without weight there are none."""
        self._sums[index] = list(values) if weight == 1 else _weighed(values, weight)
        return 1

    def first_to_wait_for(self, index: int) -> int:
        """Return the bucket itself."""
        return index

    def wait(self, index: int, version: int) -> list[Tensor | None]:
        """Return the weighed gradients."""
        return self._sums.pop(index)

    def abandon(self, index: int, version: int | None) -> None:
        """Let go of the gradients."""
        self._sums.pop(index, None)

    def drain(self) -> None:
        """Return at once: there are no peers."""

    def close(self) -> None:
        """Let go of the gradients."""
        self._sums.clear()


@torch.no_grad()
def _weighed(values: Sequence[Tensor | None], weight: float) -> list[Tensor | None]:
    given = [value for value in values if value is not None and weight]
    products = iter(torch._foreach_mul(given, weight) if given else ())
    return [None if value is None or not weight else next(products) for value in values]
