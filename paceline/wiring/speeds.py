"""The measurement of the ranks' speeds: what a rank waits for is no part of its own time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from paceline.generation.run import Run
from paceline.update.batch_norm import BatchShare


class Waits(Protocol):
    """Protocol of a replica, as far as its waits go."""

    @property
    def waited(self) -> float:
        """Seconds that this thread has waited for peers."""


def make_waited(
    run: Run, replicas: Callable[[], Collection[Waits]], shares: Collection[BatchShare]
) -> Callable[[], float]:
    """Return a function that returns the seconds that this rank has waited for peers so far.

    Args:
        run: the run, whose step summaries are awaited.
        replicas: returns the models' replicas, whose exchanges are awaited.
        shares: each once; with which SyncBatchNorm layers were made.
    """

    def waited() -> float:
        exchanges = sum(replica.waited for replica in replicas())
        return exchanges + sum(one.waited for one in shares) + run.context.summaries.waited

    return waited
