"""Protocol by which a replica lets its state be copied, each part at its own moment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from paceline.reduce.buckets import Bucket
from paceline.reduce.rank_state import RankState


class Copier(Protocol):
    """Protocol of what copies the state before one step: `begin`, then buckets, then `end`."""

    def pairs(self) -> Sequence[Copier]:
        """Return a copier for each pair of a model and an optimizer."""

    def begin(
        self,
        names: Mapping[nn.Parameter, str],
        exchanged: Collection[nn.Parameter],
        buffers: Mapping[str, Tensor | None] | None = None,
    ) -> None:
        """Copy what isn't exchanged; the running statistics of the last step are installed.

        Args:
            exchanged: the parameters that `copy_buckets` will get.
            buffers: the buffers, by name; None: the model's present ones.
        """

    def copy_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Copy the parameters and optimizer states of buckets that have the last step's update."""

    def copy_parameters(
        self, names: Mapping[nn.Parameter, str], values: Mapping[str, Tensor]
    ) -> None:
        """Copy values, by name, in place of the parameters, and nothing else."""

    def end(self, state: RankState | None, *, in_step: bool = True) -> None:
        """Copy the rank's own state; all buckets are copied."""

    def end_with(self, parts: Mapping[str, Mapping[Any, Any]]) -> None:
        """Copy further parts; all parameters are copied."""
