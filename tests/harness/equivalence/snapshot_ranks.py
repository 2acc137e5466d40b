"""Trains on ranks that are threads, takes snapshots on the way, and goes back to one.

Three runs of the same training are compared: one that nothing disturbs, one that settles before
a step and copies everything by `deepcopy`, and one that takes a snapshot and returns to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.notified import make_notified
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.comm.communicator import Communicator
from paceline.snapshots.copier import StateCopier
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.restore import restore_state
from paceline.snapshots.store import SnapshotStore
from paceline.update.batch_norm import BatchShare, convert_sync_batchnorm
from paceline.update.state_watch import plain_state
from tests.harness.equivalence.large_batch import made_up_batches, replicate, usual_step
from tests.harness.equivalence.put_synchronizers import notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.worlds import run_of
from tests.harness.twins.communicator import ThreadGroup

TOKEN = "generation"
BATCHES = made_up_batches([12] * 9)


class Interrupted(Exception):
    """A step ends in its middle, as it does when a peer is lost."""


class Average:
    """A tracked object of a script: a moving average, and a counter."""

    def __init__(self) -> None:
        self.average, self.count = torch.zeros(3), 0

    def add(self, number: int) -> None:
        self.average.lerp_(torch.full((3,), float(number)), 0.3)
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.count = state["average"], state["count"]


class Attribute:
    """An attribute of an object, tracked: a counter on which the training depends."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def state_dict(self) -> dict[str, Any]:
        return {self.name: getattr(self.owner, self.name)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        setattr(self.owner, self.name, state[self.name])


def momentum(model: nn.Module) -> Optimizer:
    """SGD with momentum, in two groups."""
    first, *others = model.parameters()
    groups = [{"params": others}, {"params": [first], "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def plain_step() -> Any:
    return usual_step


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training in which a snapshot is taken.

    Attributes:
        make_model: makes the model, the same on all ranks.
        make_optimizer: of the model.
        make_step: makes the code of a rank's steps.
        sync: makes the synchronizers of all ranks, anew for each run.
        ranks: how many there are.
        counters: attributes of the model or the step that the training depends on.
        sync_bn: BatchNorms are those of the whole batch.
        change: is done to model and optimizer before each step.
        dtype: of model and images.
    """

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], Optimizer] = momentum
    make_step: Callable[[], Any] = plain_step
    sync: Callable[[], Any] = lambda: make_allreduce
    ranks: int = 2
    counters: Sequence[tuple[str, str]] = ()
    sync_bn: bool = False
    change: Callable[[nn.Module, Optimizer, int, int], None] | None = None
    dtype: torch.dtype = torch.float64
    bucket_bytes: int = 2_000

    def on_ranks(self, work: Callable[[Rank], Any]) -> list[Any]:
        """Call `work` on each rank; return what it returned, by rank."""
        kind, layers = self.sync(), ThreadGroup(self.ranks)
        torch.manual_seed(3)
        model = self.make_model().to(self.dtype)

        def run(c: Communicator) -> Any:
            rank = Rank(self, model, c, kind, layers.communicator(c.rank))
            result = work(rank)
            rank.close()
            return result

        return run_ranks(self.ranks, run)


def by_puts(machines: Sequence[int] = (1, 1), wire: str = "fp32", kind: Any = make_notified) -> Any:
    """Return what makes the synchronizers of a run by puts."""
    return lambda: notified(False, machines, wire, kind)


@dataclass
class Rank:
    """A rank that trains, with all that a snapshot has."""

    case: Case
    model: nn.Module
    communicator: Communicator
    kind: Any
    layers: Communicator
    snapshots: SnapshotStore = field(default_factory=SnapshotStore)

    def __post_init__(self) -> None:
        self.share = BatchShare()
        self.model = copy.deepcopy(self.model)
        self.optimizer = self.case.make_optimizer(self.model)
        if self.case.sync_bn:
            self.model = convert_sync_batchnorm(self.model, run_of(self.layers), self.share)
        self.step = self.case.make_step()
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = Average()
        tracked = {"schedule": self.schedule, "average": self.average}
        for owner, name in self.case.counters:
            tracked[name] = Attribute(getattr(self, owner), name)
        if hasattr(self.step, "scaler"):
            tracked["scaler"] = self.step.scaler
        self.objects = StateObjects(model=self.model, optimizer=self.optimizer, tracked=tracked)
        self.bind()

    def bind(self) -> None:
        """Bind a new replica, with a new synchronizer."""
        self.replica = replicate(
            self.model,
            self.optimizer,
            self.communicator,
            self.case.bucket_bytes,
            self.kind,
            self.share,
        )
        if hasattr(self.step, "scaler"):
            self.replica.use_loss_scale(self.step.scaler)

    def take(self, number: int) -> SnapshotName:
        """Let the next step, which has this number, take a snapshot."""
        name = SnapshotName(TOKEN, number)
        position = {"step": number, "sums": [0.5 * number]}
        self.replica.copy_in_step(StateCopier(self.snapshots, name, self.objects, position))
        return name

    def train(self, number: int, *, interrupt: bool = False) -> None:
        """Train step `number`, the same on all ranks; or only its forward and backward."""
        if self.case.change is not None:
            self.case.change(self.model, self.optimizer, number, self.communicator.rank)
        world, rank = self.communicator.world_size, self.communicator.rank
        x, y = (t[rank::world] for t in BATCHES[number])
        with replica_step(self.replica, number, len(x) / len(BATCHES[number][0])):
            if interrupt:
                self.backward(x.to(self.case.dtype))
                raise Interrupted
            self.step(self.replica, self.model, self.optimizer, x.to(self.case.dtype), y)
        self.schedule.step()
        self.average.add(number)

    def backward(self, x: Tensor) -> None:
        """Run forward and backward, and what precedes `optimizer.step()`."""
        loss = self.model(x).sum()
        if not hasattr(self.step, "scaler"):
            loss.backward()
            return
        self.step.scaler.scale(loss).backward()
        self.replica.reduce()
        self.step.scaler.unscale_(self.optimizer)

    def interrupt(self, number: int) -> None:
        """Break off step `number` after its backward, and let go of the synchronizer."""
        with suppress(Interrupted):
            self.train(number, interrupt=True)
        self.let_go()

    def let_go(self) -> None:
        """Close the replica without settling, once all ranks do."""
        self.together()
        self.replica.close()

    def go_back(self, name: SnapshotName) -> bool:
        """Restore a snapshot, and bind a new replica to the restored state."""
        state = restore_state(self.snapshots.state(name), self.objects)
        self.bind()
        own = self.replica._binding.state
        return not state if own is None else own.restore_local(state)

    def together(self) -> None:
        """Return once all ranks are here: the first to end would be lost to the rest."""
        self.communicator.all_reduce(torch.zeros(1)).wait("all ranks")

    def close(self) -> None:
        self.let_go()

    def settled(self) -> dict[str, Any]:
        """Settle, and copy all of the state; independent of how snapshots do that."""
        self.replica.settle()
        names = {p: name for name, p in self.model.named_parameters()}
        names |= {p: f"outside {i}" for i, p in enumerate(getattr(self.model, "outside", ()))}
        states = plain_state(self.optimizer)
        tracked = {n: copy.deepcopy(one.state_dict()) for n, one in self.objects.tracked.items()}
        return {
            "parameters": {name: p.detach().clone() for p, name in names.items()},
            "requires_grad": {name: p.requires_grad for p, name in names.items()},
            "buffers": {name: b.clone() for name, b in self.model.named_buffers()},
            "optimizer": {
                names[p]: {k: copy.deepcopy(v) for k, v in states[p].items()}
                for p in names
                if p in states
            },
            "groups": [
                {
                    **copy.deepcopy({k: v for k, v in g.items() if k != "params"}),
                    "params": [names[p] for p in g["params"]],
                }
                for g in self.optimizer.param_groups
            ],
            "tracked": tracked,
            "ranks": unscaled(copy.deepcopy(self.replica.state())),
        }

    def tensors(self) -> dict[str, Tensor]:
        """List the tensors of model and optimizer."""
        found = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name, p in self.model.named_parameters():
            for key, value in plain_state(self.optimizer).get(p, {}).items():
                if isinstance(value, Tensor):
                    found[f"{name}: {key}"] = value
        return found


def undisturbed(case: Case, steps: int) -> list[dict[str, Any]]:
    """Train; return each rank's state after all steps."""

    def work(rank: Rank) -> dict[str, Any]:
        for number in range(steps):
            rank.train(number)
        return rank.settled()

    return case.on_ranks(work)


def settled_before(case: Case, step: int) -> list[dict[str, Any]]:
    """Train up to a step; return each rank's state before it."""
    return undisturbed(case, step)


def unscaled(state: Any) -> Any:
    """Return the ranks' own state with residuals that don't depend on the loss scale."""
    if state is None or "scale" not in state:
        return state
    scale, missed = state["scale"], state["missed"]  # a power of two: exact
    residuals = [{name: value / scale for name, value in group.items()} for group in missed]
    return {**state, "scale": 1.0, "missed": residuals}


def first_difference(one: Any, other: Any, where: str = "state") -> str:
    """Name where two trees differ in a bit or a type; empty if they are equal."""
    if type(one) is not type(other):
        return f"{where}: {type(one).__name__}, {type(other).__name__}"
    if isinstance(one, Tensor):
        same = one.dtype is other.dtype and torch.equal(one, other)
        return "" if same else f"{where}: {one.flatten()[:4]}, {other.flatten()[:4]}"
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return f"{where}: {sorted(map(str, one))}, {sorted(map(str, other))}"
        found = (first_difference(one[k], other[k], f"{where}[{k!r}]") for k in one)
        return next(filter(None, found), "")
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{where}: {one}, {other}"
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (first_difference(*p, f"{where}[{i}]") for i, p in pairs)), "")
    return "" if one == other else f"{where}: {one}, {other}"
