"""The replicas of several models and optimizers, as one replica to what makes steps and saves them.

paceline.parallelize(generator, optimizer_g, world)     a member
paceline.parallelize(critic, optimizer_c, world)        another one

with world.step():          all members begin; the optimizers that step train theirs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from paceline.replica.member import ReplicaMember
from paceline.replica.replica import Replica
from paceline.replica.state_copier import StateCopier


class ReplicaGroup:
    """Group of this rank's replicas, with the interface of one `Replica`.

    Args:
        members: the replicas, in the same order on all ranks. What a member has of the ranks' own
            state is in a mapping by its index, as text.
    """

    def __init__(self, members: Sequence[ReplicaMember]) -> None:
        self.members = tuple(members)

    @property
    def all_names(self) -> list[Mapping[nn.Parameter, str]]:
        """Each member's names of the parameters, as they were when it was bound."""
        return [member.names for member in self.members]

    @property
    def bindings(self) -> int:
        """How often members were bound to a synchronizer."""
        return sum(member.bindings for member in self.members)

    @property
    def stateful(self) -> bool:
        """Whether ranks divide state of any member; the same on all."""
        return any(member.stateful for member in self.members)

    @property
    def ended(self) -> bool:
        """Whether no step is under way that an optimizer may still end."""
        return all(member.ended for member in self.members)

    @property
    def exchanging(self) -> bool:
        """Whether the communicator of all ranks is in use: members have their own."""
        return False

    def begin_batch(self) -> None:
        """Begin a batch in all members."""
        for member in self.members:
            member.begin_batch()

    def discard_batches(self) -> None:
        """Discard in all members what batches left that no step will train."""
        for member in self.members:
            member.discard_batches()

    @contextmanager
    def step(self, number: int, weight: float) -> Iterator[None]:
        """Run a step of all members; as `Replica.step`."""
        with ExitStack() as steps:
            for member in self.members:
                steps.enter_context(member.step(number, weight))
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate in all members."""
        with ExitStack() as blocks:
            for member in self.members:
                blocks.enter_context(member.no_sync())
            yield

    def reduce(self) -> None:
        """Reduce the gradients of the members whose optimizers haven't stepped; as `Replica`."""
        under_way = [member for member in self.members if not (member.ended or member.frozen)]
        for member in under_way or self.members[:1]:  # which raises, where no step runs
            member.reduce()

    def settle(self) -> None:
        """Settle all members; local."""
        for member in self.members:
            member.settle()

    def take_snapshot(self, copier: StateCopier) -> None:
        """Let the next step copy the state before it, of all members."""
        for member, own in zip(self.members, copier.members(), strict=True):
            member.take_snapshot(own)

    def take_snapshot_between_steps(self, copier: StateCopier) -> None:
        """Settle, and copy the state before the next step at once."""
        for member, own in zip(self.members, copier.members(), strict=True):
            member.take_snapshot_between_steps(own)

    def synchronize_replicas(self) -> None:
        """Settle, and make the replicas of all ranks equal; collective."""
        for member in self.members:
            member.synchronize_replicas()

    def drain(self) -> None:
        """Return once the peers have everything that they need from this rank, or after a limit."""
        for member in self.members:
            member.drain()

    def state(self) -> Mapping[str, Any] | None:
        """Settle, and return the ranks' own state of each member; as `Replica.state`."""
        states = {str(index): member.state() for index, member in enumerate(self.members)}
        found = {index: state for index, state in states.items() if state is not None}
        return found or None

    def follow(self, scale: Callable[[], float]) -> None:
        """Rescale lossy wires' residuals by the loss's `scale`."""
        for member in self.members:
            member.follow(scale)

    def leave_generation(self) -> None:
        """Leave the generation with all members."""
        for member in self.members:
            member.leave_generation()

    def enter_generation(self, parts: Sequence[Mapping[str, Any]]) -> bool:
        """Enter the next generation with all members; as `Replica.enter_generation`."""
        whole = [
            member.enter_generation([part.get(str(index), {}) for part in parts])
            for index, member in enumerate(self.members)
        ]
        return all(whole)


AnyReplica = Replica | ReplicaGroup
"""The replica of one model and optimizer, or the group of several."""
