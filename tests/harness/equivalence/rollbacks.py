"""Rollbacks: a training whose contexts end in mid-step, and what many of them leave behind.

    python -m tests.harness.equivalence.rollbacks [--sync notified]

All ranks, threads of this process, train over Gloo, TCP and shared memory. At moments of its own
each rank breaks off a step, or loses a peer that did. Then all restore the newest snapshot that all
hold, make the next generation's context, and train on.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional as F

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.comm.communicator import Communicator, total
from paceline.comm.process_group import UNFINISHED
from paceline.config.world import SyncConfig
from paceline.errors import CommError
from paceline.generation.connector import connect
from paceline.generation.run import Run
from paceline.replica.replica import Replica
from paceline.snapshots.copier import StateCopier
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.restore import restore_state
from paceline.snapshots.store import SnapshotStore
from paceline.wiring.exchange import replicate
from tests.harness.equivalence.memory_growth import Usage
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.membership.given_membership import GivenConnector
from tests.harness.processes.worlds import open_context, world_of

LIMIT = 10.0  # a thread of Gloo's may wait as long
CPU = torch.device("cpu")
MOMENTS = ("begin", "forward", "backward", "update", "end")
CONFIGS = {
    "allreduce": SyncConfig(sync="allreduce", bucket_mb=1e-3),
    "notified": SyncConfig(sync="notified", bucket_mb=1e-3),
    "sharded": SyncConfig(sync="notified", update="sharded", bucket_mb=1e-3),
    "int8": SyncConfig(sync="notified", wire="int8", bucket_mb=1e-3),
    "sharded, int8": SyncConfig(sync="notified", update="sharded", wire="int8", bucket_mb=1e-3),
}
Moments = Sequence[Sequence[tuple[int, str]]]


class BrokenOff(Exception):
    """Exception that ends a context in mid-step."""


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10)
    )


@dataclass
class Rollbacks:
    """A training whose contexts are broken off, and what all its ranks share.

    Attributes:
        config: how ranks exchange.
        machines: the number of ranks on each.
        steps: the number of steps of the training.
        moments: for each context but the last, for each rank: the step and the moment at which it
            breaks off.
        measured: the contexts after whose end it is measured what the process has.
        usages: that, by context.
        opened: its open files, likewise.
    """

    config: SyncConfig
    machines: tuple[int, ...]
    steps: int
    moments: Moments = ()
    measured: tuple[int, ...] = ()
    usages: list[Usage] = field(default_factory=list)
    opened: list[list[str]] = field(default_factory=list)
    _held: dict[int, tuple[SnapshotName, ...]] = field(default_factory=dict)
    _store: HashStore = field(default_factory=HashStore)
    _model: nn.Module = field(default_factory=net)

    def __post_init__(self) -> None:
        self._all_ranks = threading.Barrier(sum(self.machines))

    def run(self) -> list[dict[str, Tensor]]:
        """Train; return each rank's weights and momenta."""
        return run_ranks(sum(self.machines), self._train)

    def _train(self, c: Communicator) -> dict[str, Tensor]:
        model, snapshots = copy.deepcopy(self._model), SnapshotStore()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        objects = StateObjects(model=model, optimizer=optimizer, tracked={"schedule": schedule})
        limits = (LIMIT, LIMIT)
        connecting = partial(connect, store=self._store, device=CPU, limits=limits)
        make_context = partial(open_context, connect=connecting, device=CPU, limits=limits)
        step, machines = 0, self.machines
        groups = [world_of(machines, c.rank, token=f"token {n}", number=n) for n in range(99)]
        with Run(context=make_context(groups[0]), connector=GivenConnector(make_context)) as run:
            replica = replicate(model, optimizer, run, self.config)
            for number in range(len(self.moments) + 1):
                moment = self.moments[number][c.rank] if number < len(self.moments) else None
                try:
                    self._train_steps(c, run, replica, objects, snapshots, step, moment)
                except (BrokenOff, CommError):
                    assert moment is not None
                else:
                    assert moment is None
                    break
                replica.leave_generation()
                run.context.abort()
                step, local = self._go_back(c, number, snapshots, objects)
                run.enter(groups[number + 1])
                replica.enter_generation([local])
            replica.close()
        momenta = {
            f"momentum {index}": state["momentum_buffer"]
            for index, state in enumerate(map(optimizer.state.get, model.parameters()))
            if state
        }
        return {**model.state_dict(), **momenta}

    def _train_steps(
        self,
        c: Communicator,
        run: Run,
        replica: Replica,
        objects: StateObjects,
        snapshots: SnapshotStore,
        first: int,
        moment: tuple[int, str] | None,
    ) -> None:
        model, optimizer = objects.model, objects.optimizer
        for step in range(first, self.steps):

            def pass_by(name: str, step: int = step) -> None:
                if (step, name) == moment:
                    raise BrokenOff

            if not snapshots.full:
                name = SnapshotName(run.context.world.generation.token, step)
                position = {"step": step}
                replica.copy_in_step(StateCopier(snapshots, name, objects, position))
            with replica_step(replica, step, 1 / c.world_size):
                pass_by("begin")
                loss = F.cross_entropy(*self._predict(model, c, step))
                pass_by("forward")
                loss.backward()
                pass_by("backward")
                optimizer.step()
                pass_by("update")
                optimizer.zero_grad()
            objects.tracked["schedule"].step()  # type: ignore[attr-defined]
            self._held[c.rank] = snapshots.held
            snapshots_of_all = self._held_by_all(c.world_size)
            if snapshots_of_all:
                snapshots.commit(snapshots_of_all[-1])
            pass_by("end")
        replica.settle()
        replica.drain()

    def _predict(self, model: nn.Module, c: Communicator, step: int) -> tuple[Tensor, Tensor]:
        made_up = torch.Generator().manual_seed(100 * step + c.rank)
        x = torch.randn(4, 3, 8, 8, generator=made_up)
        return model(x), torch.randint(10, (4,), generator=made_up)

    def _measure(self) -> None:
        deadline = time.monotonic() + 3 * LIMIT
        while UNFINISHED and time.monotonic() < deadline:  # Gloo's threads wait for their limit
            time.sleep(0.1)  # they signal nothing
        self.usages.append(Usage.now())
        self.opened.append(open_files())

    def _held_by_all(self, world_size: int) -> list[SnapshotName]:
        held = [set(self._held.get(rank, ())) for rank in range(world_size)]
        return sorted(set.intersection(*held), key=lambda name: name.step)

    def _go_back(
        self, c: Communicator, number: int, snapshots: SnapshotStore, objects: StateObjects
    ) -> tuple[int, Mapping[Any, Any]]:
        """Restore the newest snapshot that all ranks hold; return its step, and the local state."""
        self._held[c.rank] = snapshots.held
        meet(c)
        if number in self.measured:
            self._all_ranks.wait(LIMIT)
            if c.rank == 0:
                self._measure()
            # A rank in a collective looks at its connections meanwhile, by a file that it opens.
            self._all_ranks.wait(4 * LIMIT)
        name = self._held_by_all(c.world_size)[-1]
        meet(c)
        snapshots.start_from(name)
        local = restore_state(snapshots.state(name), objects)
        self._held[c.rank] = snapshots.held
        meet(c)
        return int(snapshots.state(name)["position"]["step"]), local


def open_files() -> list[str]:
    """Return what this process has open, for a report."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(found)


def meet(c: Communicator) -> None:
    """Return once all ranks have come; for what the control line will carry."""
    total(c, torch.zeros(1), "a meeting")


def drawn(seed: int, contexts: int, ranks: int, steps: int) -> Moments:
    """Draw moments that come later from context to context, of each rank in one of two steps."""
    draw, each = random.Random(seed), steps // (contexts + 1)
    firsts = [2 + number * each for number in range(contexts)]
    return [
        [(first + draw.randrange(2), draw.choice(MOMENTS)) for _ in range(ranks)]
        for first in firsts
    ]


def main() -> int:
    """Make contexts; return 1 if those after the first third leave something behind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sync", choices=CONFIGS, default="notified")
    parser.add_argument("--contexts", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    contexts, early = options.contexts, options.contexts // 3
    steps, measured = 3 * (contexts + 1), (early - 1, contexts - 1)
    moments = drawn(7, contexts, 3, steps)
    rollbacks = Rollbacks(CONFIGS[options.sync], (2, 1), steps, moments, measured)
    rollbacks.run()
    before, after = rollbacks.usages
    print(f"after {early} contexts {before}\nafter {contexts} contexts {after}")
    kept = {
        "descriptors": after.files != before.files,
        "threads": after.threads != before.threads,
        "objects": after.objects
        >= before.objects + (contexts - early) * 10,  # less than ten a context
        # Heaps and the stacks of ended threads are the C library's; a few of those come and go.
        "mappings": after.mappings - after.heaps > before.mappings - before.heaps + 3,
        "memory": after.memory > 1.02 * before.memory,
    }
    more = [name for name, is_more in kept.items() if is_more]
    if "descriptors" in more:
        print(*rollbacks.opened, sep="\n")
    print(", ".join(more) or "equal")
    return int(bool(more))


if __name__ == "__main__":
    sys.exit(main())
