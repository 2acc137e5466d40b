"""The replicas of several models and optimizers, as one replica to what makes steps and saves them.

paceline.parallelize(generator, optimizer_g, world)     a replica
paceline.parallelize(critic, optimizer_c, world)        another one

with world.step():          all replicas begin; the optimizers that step train theirs
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from paceline.algorithms.average import Averaging
from paceline.algorithms.synchronizer import Weights
from paceline.replica.checksums import Checksums, Parts
from paceline.replica.copier import Copier
from paceline.replica.replica import LossScaler, Replica

STEPPED_BITS = 10  # of a summary: for a step, and as many for further blocks of its batch


class ReplicaGroup:
    """Group of this rank's replicas, with the interface of one `Replica`.

    Args:
        replicas: in the same order on all ranks. What a replica has of the ranks' own
            state is in a mapping by its index, as text.
    """

    rounds: Averaging | None = None
    equal_between_steps = True  # one model alone is served
    masters = None  # likewise

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = tuple(replicas)

    @property
    def all_names(self) -> list[Mapping[nn.Parameter, str]]:
        """Each replica's names of the parameters, as they were when it was bound."""
        return [replica.names for replica in self.replicas]

    @property
    def bindings(self) -> int:
        """How often replicas were bound to a synchronizer."""
        return sum(replica.bindings for replica in self.replicas)

    @property
    def stateful(self) -> bool:
        """Whether ranks divide state of any replica; the same on all."""
        return any(replica.stateful for replica in self.replicas)

    @property
    def ended(self) -> bool:
        """Whether no step is under way that an optimizer may still end."""
        return all(replica.ended for replica in self.replicas)

    @property
    def stepped(self) -> int:
        """Which replicas ended the last step by `optimizer.step()`: bit i is replica i's."""
        bits = (
            replica.stepped << index for index, replica in enumerate(self.replicas[:STEPPED_BITS])
        )
        return sum(bits)

    @property
    def loaded(self) -> Checksums:
        """As `Replica.loaded`, of all replicas."""
        replicas = enumerate(self.replicas, start=1)
        return {
            f"{what} (replica {number})": total
            for number, replica in replicas
            for what, total in replica.loaded.items()
        }

    @property
    def exchanging(self) -> bool:
        """Whether the communicator of all ranks is in use: replicas have their own."""
        return False

    @property
    def added_to_kept(self) -> bool:
        """As `Replica.added_to_kept`, of any replica."""
        return False  # what another model's pass has left is zeroed, as a rule

    def begin_batch(self) -> None:
        """Begin a batch in all replicas."""
        for replica in self.replicas:
            replica.begin_batch()

    def discard_batches(self) -> None:
        """Discard in all replicas what batches left that no step will train."""
        for replica in self.replicas:
            replica.discard_batches()

    def begin(self, number: int, weight: float, samples: int = 1) -> None:
        """Begin a step of all replicas; as `Replica.begin`."""
        for replica in self.replicas:
            replica.begin(number, weight)

    def end(self) -> None:
        """End the step of all replicas; as `Replica.end`."""
        for replica in reversed(self.replicas):
            replica.end()

    def abandon(self) -> None:
        """Do nothing, as `Replica.abandon`."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate in all replicas."""
        with ExitStack() as blocks:
            for replica in self.replicas:
                blocks.enter_context(replica.no_sync())
            yield

    def reduce(self) -> None:
        """Reduce the gradients of the replicas whose optimizers haven't stepped; as `Replica`."""
        under_way = [replica for replica in self.replicas if not (replica.ended or replica.frozen)]
        for replica in under_way or self.replicas[:1]:  # which raises, where no step runs
            replica.reduce()

    def settle(self, weights: Weights = Weights.OWN) -> None:
        """Settle all replicas."""
        for replica in self.replicas:
            replica.settle(weights)

    def synchronize(self) -> None:
        """Settle all replicas, which are equal between steps."""
        self.settle()

    @property
    def stale_reads(self) -> Counter[int]:
        """As `Replica.stale_reads`: none is behind."""
        return Counter()

    @property
    def unused(self) -> bool:
        """As `Replica.unused`, of all replicas."""
        return all(replica.unused for replica in self.replicas)

    @property
    def unwritten(self) -> bool:
        """As `Replica.unwritten`, of all replicas."""
        return all(replica.unwritten for replica in self.replicas)

    def copy_in_step(self, copier: Copier) -> None:
        """Let the next step copy the state before it, of all replicas."""
        for replica, own in zip(self.replicas, copier.pairs(), strict=True):
            replica.copy_in_step(own)

    def copy_now(self, copier: Copier, *, own: bool = True) -> bool:
        """Settle, and copy the state before the next step at once; as `Replica`."""
        each = zip(self.replicas, copier.pairs(), strict=True)
        bound = [replica.copy_now(own) for replica, own in each]
        return all(bound)

    def drain(self) -> None:
        """Return once the peers have everything that they need from this rank, or after a limit."""
        for replica in self.replicas:
            replica.drain()

    def state(self) -> Mapping[str, Any] | None:
        """Settle, and return the ranks' own state of each replica; as `Replica.state`."""
        states = {str(index): replica.state() for index, replica in enumerate(self.replicas)}
        found = {index: state for index, state in states.items() if state is not None}
        return found or None

    def use_loss_scale(self, scaler: LossScaler) -> None:
        """Rescale lossy wires' residuals by the scale of the loss."""
        for replica in self.replicas:
            replica.use_loss_scale(scaler)

    def leave_generation(self) -> None:
        """Leave the generation with all replicas."""
        for replica in self.replicas:
            replica.leave_generation()

    def enter_generation(
        self, parts: Sequence[Mapping[str, Any]] | None, snapshot: Parts | None = None
    ) -> bool:
        """Enter the next generation with all replicas; as `Replica.enter_generation`."""
        whole = [
            replica.enter_generation(
                None if parts is None else [part.get(str(index), {}) for part in parts]
            )
            for index, replica in enumerate(self.replicas)
        ]
        return all(whole)


AnyReplica = Replica | ReplicaGroup
"""The replica of one model and optimizer, or the group of several."""
