"""Pipelines in one process: ranks are threads, and so is what connects them; and their reference.

pipeline = Pipelines(stages=2, replicas=2)
results = pipeline.on_ranks(function)       function(rank) of a `PipelineRank`
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.cluster.membership.generation import Group
from paceline.comm.communicator import Communicator
from paceline.comm.window import Window
from paceline.config.world import SyncConfig
from paceline.errors import CommError
from paceline.generation.context import GenerationContext, WindowSpec
from paceline.generation.mesh import Mesh
from paceline.generation.run import Run
from paceline.parallel.cutting import cut_model
from paceline.parallel.pipeline import PipelineOptions
from paceline.parallel.stage import Stage
from paceline.replica.replica import Replica
from paceline.update.batch_norm import BatchShare
from paceline.wiring.exchange import replicate
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.worlds import world_of
from tests.harness.twins.communicator import ThreadGroup
from tests.harness.twins.window import WindowGroup

T = TypeVar("T")
MakeOptimizer = Callable[[Sequence[nn.Parameter]], Optimizer]
Batches = Sequence[tuple[Tensor, Tensor]]
State = dict[str, Tensor]


class Connections:
    """What connects ranks that are threads: communicators, and windows, by axis and purpose."""

    def __init__(self) -> None:
        self._groups: dict[tuple[tuple[int, ...], str], ThreadGroup] = {}
        self._windows: dict[tuple[Any, ...], WindowGroup] = {}
        self._lock = threading.Lock()

    def connect(self, group: Group, purpose: str) -> Communicator:
        """Return the communicator of a rank in a group."""
        with self._lock:
            ranks = self._groups.setdefault((group.ranks, purpose), ThreadGroup(group.size))
        return ranks.communicator(group.rank)

    def window(self, group: Group, key: tuple[Any, ...], size: int, notifications: int) -> Window:
        """Return the window of a rank in a group."""
        with self._lock:
            key = (group.ranks, *key)
            if key not in self._windows:
                self._windows[key] = WindowGroup(
                    group.size, size, notifications, machines=(group.size,)
                )
        return self._windows[key].window(group.rank)


class ThreadContext(GenerationContext):
    """Context of a rank that is a thread."""

    def __init__(self, connections: Connections, world: Group, mesh: Mesh) -> None:
        super().__init__(world, device=torch.device("cpu"), limits=(10.0, 10.0), mesh=mesh)
        self._connections = connections
        self._number = 0

    def window(self, purpose: str, spec: WindowSpec, size: int, notifications: int) -> Window:
        self._number += 1
        key = (purpose, self._number)
        opened = self._connections.window(self.along(spec.axis), key, size, notifications)
        self.let_interrupt(opened, spec.axis)
        return opened


@dataclass
class BoundLater:
    """Replica of a stage's gradients: the one that a test binds later."""

    replica: Replica | None = None
    continues: bool = False  # after a loss in an evaluation

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext() if self.replica is None else self.replica.no_sync()

    def lose(self, error: CommError) -> None:
        """Raise the error, or let it be, as a test wants."""
        if not self.continues:
            raise error


@dataclass
class PipelineRank:
    """One rank of a pipeline.

    Attributes:
        run: its run.
        sync: exchanges the gradients of its stage.
        said: what the cutting has reported here.
        folder: of the run.
    """

    run: Run
    sync: BoundLater = field(default_factory=BoundLater)
    said: list[str] = field(default_factory=list)
    folder: Path | None = None

    def cut(self, model: nn.Module, loss: Callable[[Any, Any], Tensor], **options: Any) -> Stage:
        """Return this rank's stage of a model's copy."""
        return cut_model(
            copy.deepcopy(model),
            self.run,
            self.sync,
            PipelineOptions(loss=loss, **options),
            report=self.said.append,
            folder=self.folder,
        )

    def bind(self, stage: Stage, optimizer: Optimizer, config: SyncConfig) -> Replica:
        """Exchange a stage's gradients along the data axis."""
        replica = replicate(stage, optimizer, self.run, config, BatchShare())
        self.sync.replica = replica
        return replica

    def own(self, batch: Tensor) -> Tensor:
        """Return this replica's slice of a batch."""
        data = self.run.context.along("data")
        return batch.tensor_split(data.size)[data.rank]


def on_ranks(
    function: Callable[[PipelineRank], T], stages: int, replicas: int = 1, tensor: int = 1
) -> list[T]:
    """Run a function on each rank of a pipeline; return what each returns."""
    connections = Connections()
    size = stages * replicas * tensor
    axes = (("stage", stages), ("data", replicas), ("tensor", tensor))
    mesh = Mesh(machines=(0,) * size, axes=axes)

    def run(own: Communicator) -> T:
        world = world_of((size,), own.rank)
        context = ThreadContext(connections, world, mesh).open(connections.connect)
        with Run(context=context) as made:
            return function(PipelineRank(made))

    return run_ranks(size, run)


def train(
    rank: PipelineRank,
    stage: Stage,
    make_optimizer: MakeOptimizer,
    batches: Batches,
    config: SyncConfig,
    accumulates: int = 1,
) -> tuple[list[float], State]:
    """Train a stage; return the losses of its replica, and the whole model's state dict."""
    optimizer = make_optimizer([*stage.parameters()])
    replica = rank.bind(stage, optimizer, config)
    losses = []
    for number in range(0, len(batches), accumulates):
        group = batches[number : number + accumulates]
        with replica_step(replica, number, len(rank.own(group[0][0])) / len(group[0][0])):
            for x, y in group[:-1]:
                with replica.no_sync():
                    losses.append(stage.train_batch(rank.own(x), rank.own(y)).item())
            x, y = group[-1]
            losses.append(stage.train_batch(rank.own(x), rank.own(y)).item())
            optimizer.step()
            optimizer.zero_grad()
    state = stage.whole_state_dict()
    replica.drain()
    replica.close()
    return losses, state


def train_alone(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    make_optimizer: MakeOptimizer,
    batches: Batches,
    microbatches: int,
    accumulates: int = 1,
) -> tuple[list[float], State]:
    """Train a model in one process, which runs the same microbatches one after the other."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer([*model.parameters()])
    losses = []
    for number, (x, y) in enumerate(batches, 1):
        pairs = zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True)
        total = 0.0
        for own_x, own_y in pairs:
            if len(own_x):
                part = loss(model(own_x), own_y) * len(own_x) / len(x)
                part.backward()
                total += part.item()
        losses.append(total)
        if not number % accumulates:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()
