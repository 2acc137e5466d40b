"""Training continues with fewer ranks from a snapshot, and later with more, as one process trains.

Members train over Gloo, TCP and shared memory. A generation ends in mid-step. The next one divides
the newest snapshot that all members hold among its ranks, and repeats the same global batches:

    generation 0    ranks 0 and 1 | 2    members a and b | c
    generation 1    ranks 0 | 1          members a | c           b's part is handed over
    generation 2    ranks 0 and 1 | 2    members a and b | c     b takes a copy of a's snapshot
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.nn import functional as F

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.comm.communicator import Communicator
from paceline.config.world import SyncConfig
from paceline.errors import CommError
from paceline.generation.connector import connect
from paceline.generation.run import Run
from paceline.replica.replica import Replica
from paceline.snapshots.copier import StateCopier
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.restore import restore_state
from paceline.snapshots.store import SnapshotStore
from paceline.state.state_copy import copy_state
from paceline.wiring.exchange import replicate
from tests.harness.equivalence.case_steps import adam
from tests.harness.equivalence.large_batch import Training, convnet, largest_difference, sgd
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.worlds import open_context, world_of

CPU, LIMITS = torch.device("cpu"), (10.0, 10.0)
A, B, C = range(3)  # the members
STEPS = 14
EVERY = 3  # steps: a rank that trains the third one knows that all hold the snapshot
CONFIGS = {
    "allreduce": SyncConfig(sync="allreduce", bucket_mb=1e-3),
    "notified": SyncConfig(sync="notified", bucket_mb=1e-3),
    "sharded": SyncConfig(sync="notified", update="sharded", bucket_mb=1e-3),
}


class BrokenOff(Exception):
    """Exception that ends a generation in mid-step."""


@dataclass(frozen=True)
class Generation:
    """A generation of the training.

    Attributes:
        machines: the number of ranks on each.
        members: the members, in rank order.
        ends: for each rank, the step and the moment in which it breaks off; empty: in none.
    """

    machines: tuple[int, ...]
    members: tuple[int, ...]
    ends: Sequence[tuple[int, str]] = ()


GENERATIONS = (
    Generation((2, 1), (A, B, C), [(5, "forward"), (5, "update"), (6, "begin")]),
    Generation((1, 1), (A, C), [(11, "backward"), (11, "update")]),
    Generation((2, 1), (A, B, C)),
)


class Member:
    """A member of the run: its replica, and its snapshots."""

    def __init__(self, training: Training) -> None:
        self.model = copy.deepcopy(training.model)
        self.optimizer = training.make_optimizer(self.model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, training.gamma)
        self.schedule, self.snapshots, self.step = schedule, SnapshotStore(), 0
        tracked = {"schedule": schedule}
        self.objects = StateObjects(model=self.model, optimizer=self.optimizer, tracked=tracked)

    def take(self, name: SnapshotName, replica: Replica) -> None:
        """Let the next step take a snapshot; all members hold the one before it."""
        for held in self.snapshots.held[-1:]:
            self.snapshots.commit(held)
        position = {"step": name.step}
        replica.copy_in_step(StateCopier(self.snapshots, name, self.objects, position))

    def go_back(self, name: SnapshotName) -> Mapping[str, Any]:
        """Restore a snapshot that all members hold; return what this one alone owned."""
        self.snapshots.start_from(name)
        self.snapshots.commit(name)
        return self._restore(self.snapshots.state(name))

    def come_back(self, other: Member, name: SnapshotName) -> None:
        """Take what all members have alike from a copy of another one's snapshot."""
        self.snapshots = SnapshotStore()
        self._restore(copy_state(other.snapshots.state(name)))

    def _restore(self, state: Mapping[str, Mapping[Any, Any]]) -> Mapping[str, Any]:
        self.step = int(state["position"]["step"])
        return restore_state(state, self.objects)


@dataclass
class Elastic:
    """A training by generations of several members, each of which is a thread.

    Attributes:
        starts: for each generation but the first, the step from which it continues.
    """

    training: Training
    config: SyncConfig
    starts: list[int] = field(default_factory=list)
    _store: HashStore = field(default_factory=HashStore)

    def run(self) -> list[Member]:
        """Train through all generations; return the members."""
        members = [Member(self.training) for _ in (A, B, C)]
        parts: list[Mapping[str, Any]] = []
        for number, generation in enumerate(GENERATIONS):
            own = [members[member] for member in generation.members]
            run_ranks(len(own), partial(self._train, number, own, parts))
            if generation.ends:
                common = set.intersection(*(set(member.snapshots.held) for member in own))
                name = max(common, key=lambda name: name.step)
                parts = [member.go_back(name) for member in own]
                for parked in set(members) - set(own):
                    parked.come_back(own[0], name)
                self.starts.append(own[0].step)
        return members

    def _train(
        self,
        number: int,
        members: Sequence[Member],
        parts: Sequence[Mapping[str, Any]],
        c: Communicator,
    ) -> None:
        """Train a rank of a generation until it breaks off, or loses a peer that does."""
        generation, member = GENERATIONS[number], members[c.rank]
        group = world_of(generation.machines, c.rank, token=f"token {number}", number=number)
        connecting = partial(connect, store=self._store, device=CPU, limits=LIMITS)
        try:
            with open_context(group, connecting, device=CPU, limits=LIMITS) as context:
                run = Run(context=context)
                replica = replicate(member.model, member.optimizer, run, self.config)
                try:
                    state = replica._binding.state
                    assert state is None or not parts or state.restore(state.combine(parts))
                    self._train_steps(number, member, replica, c)
                finally:
                    replica.close()
        except (BrokenOff, CommError):
            assert generation.ends

    def _train_steps(self, number: int, member: Member, replica: Replica, c: Communicator) -> None:
        generation = GENERATIONS[number]
        end = generation.ends[c.rank] if generation.ends else None
        start = member.step
        for step in range(start, STEPS):

            def pass_by(moment: str, step: int = step) -> None:
                if (step, moment) == end:
                    raise BrokenOff

            if step % EVERY == 0 and step > start:
                member.take(SnapshotName(f"token {number}", step), replica)
            x, y = self.training.batches[step]
            cuts = [len(x) * rank // c.world_size for rank in (c.rank, c.rank + 1)]
            with replica_step(replica, step, (cuts[1] - cuts[0]) / len(x)):
                pass_by("begin")
                loss = F.cross_entropy(member.model(x[slice(*cuts)]), y[slice(*cuts)])
                pass_by("forward")
                loss.backward()
                pass_by("backward")
                member.optimizer.step()
                pass_by("update")
                member.optimizer.zero_grad()
            member.schedule.step()
        replica.settle()
        replica.drain()


@pytest.mark.parametrize("make_optimizer", [adam, sgd])
@pytest.mark.parametrize("name", CONFIGS)
def test_training_with_fewer_ranks_and_then_more_is_that_of_one_process(
    name: str, make_optimizer: Any
) -> None:
    torch.manual_seed(3)
    training = Training.of(convnet(), make_optimizer, STEPS)
    elastic = Elastic(training, CONFIGS[name])
    states = [member.model.state_dict() for member in elastic.run()]
    for state in states:
        assert largest_difference(state, training.alone()) < 1e-10
        assert largest_difference(state, states[0]) == 0
    assert elastic.starts == [3, 9]
