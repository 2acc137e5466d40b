"""The durable state, to which a run goes back where all copies of a part of the state are lost.

    decided: start = 12, durable        the members drop what they hold in memory
    connected                           restore: from a file of step 12, or the run's beginning
    the replica enters                  restore_exchange

A generation that starts there is recorded only once the state is restored: where no member can read
it, the lineage stays as it was, and the next start of the run resumes as if there were no vote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.cluster.membership.generation import Group
from paceline.errors import many
from paceline.snapshots.position import Position


@dataclass(frozen=True, kw_only=True)
class EpochSize:
    """Size of an epoch.

    Attributes:
        samples: its number of samples, over all ranks.
        batch: samples of a step, over all ranks; the last step may have fewer.
    """

    samples: int
    batch: int

    def trained(self, position: Position) -> int:
        """Return the number of samples that are trained at a position of the run."""
        return position.epoch * self.samples + min(position.step * self.batch, self.samples)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Durable state that was restored.

    Attributes:
        position: of the run.
        name: of the state, for messages.
    """

    position: Position
    name: str


class DurableState(Protocol):
    """Protocol of what restores the durable state from which the present generation starts."""

    def restore(self, reached: Position) -> Restored:
        """Restore model, optimizer and tracked objects; no replica is bound. Collective.

        Args:
            reached: where the run was.

        Raises:
            CheckpointError: no member can read the state, or this run can't go back to it.
        """

    def restore_exchange(self) -> None:
        """Restore what ranks have besides model and optimizer, in the entered replica."""

    def record(self, group: Group) -> None:
        """Record a generation's number and lineage in the run's folder.

        Args:
            group: its ranks, as this one sees them.
        """

    def report(self, sentence: str) -> None:
        """Record a sentence for the user, and show it."""


def sentence_of(reached: Position, restored: Restored, size: EpochSize | None) -> str:
    """Return what a run that went back says: to which state, and what is trained again."""
    back = restored.position
    again = "these steps are trained again"
    if size is not None:
        again = f"{many(size.trained(reached) - size.trained(back), 'sample')} are trained again"
    return (
        f"The run went back from step {reached.number:,} to step {back.number:,} of epoch "
        f"{back.epoch + 1}, which is {restored.name}: {again}."
    )
