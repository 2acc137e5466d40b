"""Ranks of two stages that train apart: what asks the axis "data", and what asks "all"."""

from __future__ import annotations

import copy
import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.cluster.membership.generation import Group
from paceline.comm.communicator import Communicator
from paceline.config.world import SyncConfig
from paceline.generation.context import GenerationContext, WindowSpec
from paceline.generation.mesh import Mesh
from paceline.generation.run import Run
from paceline.update.batch_norm import BatchShare, convert_sync_batchnorm
from paceline.wiring.exchange import replicate
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.worlds import open_context, world_of
from tests.harness.twins.communicator import ThreadGroup

CPU = torch.device("cpu")
MACHINES = (2, 2)
MESH = Mesh(machines=(0, 0, 1, 1), axes=(("stage", 2), ("data", 2)))
LIMITS = (10.0, 10.0)


class Connections:
    """What connects the lines of ranks, which are threads, by their purposes."""

    def __init__(self) -> None:
        self._groups: dict[tuple[tuple[int, ...], str], ThreadGroup] = {}
        self._lock = threading.Lock()

    def connect(self, group: Group, purpose: str) -> Communicator:
        with self._lock:
            if (group.ranks, purpose) not in self._groups:
                self._groups[group.ranks, purpose] = ThreadGroup(group.size)
        return self._groups[group.ranks, purpose].communicator(group.rank)


def test_replicas_are_equal_along_the_data_axis_and_summaries_are_of_all_ranks() -> None:
    connections = Connections()

    def train(own: Communicator) -> dict[str, Any]:
        world = world_of(MACHINES, own.rank)
        context = open_context(world, connections.connect, device=CPU, limits=LIMITS, mesh=MESH)
        with Run(context=context) as run:
            share = BatchShare()
            layers = [nn.BatchNorm1d(1, momentum=1.0), nn.Linear(1, 1, bias=False)]
            model = convert_sync_batchnorm(nn.Sequential(*layers), run, share).double()
            nn.init.constant_(layers[1].weight, 10.0 + own.rank)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            replica = replicate(model, optimizer, run, SyncConfig(sync="allreduce"), share)
            rank, ranks = run.rank_and_size()
            started = layers[1].weight.item()
            with replica_step(replica, 0, 1 / ranks):
                output = model(torch.full((1, 1), float(own.rank)).double())
                (own.rank * output).sum().backward()
                optimizer.step()
            replica.settle()
            sums = torch.ones(1, dtype=torch.float64)
            context.summaries.send(0, sums, stop=own.rank == 3)
            (summary,) = context.summaries.receive(before=1)
            weights = [p.item() for p in model.parameters()]
            replica.close()
        return {
            "place": (rank, ranks),
            "started": started,
            "mean": model[0].running_mean.item(),
            "weights": weights,
            "summed": (summary.sums, summary.stop),
        }

    found = run_ranks(4, train)
    assert [each["place"] for each in found] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [each["started"] for each in found] == [10.0, 10.0, 12.0, 12.0]
    assert [each["mean"] for each in found] == [0.5, 0.5, 2.5, 2.5]
    zero, one, two, three = (each["weights"] for each in found)
    assert zero == one
    assert two == three
    # A rank's input is normalised to -1 or 1, so the gradient is (1 - 0) / 2, and (3 - 2) / 2.
    assert [zero[-1], two[-1]] == pytest.approx([9.5, 11.5], abs=1e-3)
    assert all(each["summed"] == ((4.0,), True) for each in found)


def stage_model(stage: int) -> nn.Module:
    """Return a stage's part, which differs from the other's in shapes, too."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(5, 7 + stage), nn.Tanh(), nn.Linear(7 + stage, 3)).double()


def batch_of(stage: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the global batch of a stage's step: (6, 5), (6,)."""
    numbers = torch.Generator().manual_seed(100 * stage + step)
    return torch.randn(6, 5, generator=numbers).double(), torch.arange(6) % 3


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def trained_alone(stage: int, steps: int) -> list[Tensor]:
    model = stage_model(stage)
    optimizer = optimizer_of(model)
    for step in range(steps):
        x, y = batch_of(stage, step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("machines", [(2, 2), (4,), (1, 1, 1, 1)])
@pytest.mark.parametrize(
    "config",
    [
        SyncConfig(sync="allreduce"),
        SyncConfig(sync="notified", bucket_mb=1e-4),
        SyncConfig(sync="notified", update="sharded", bucket_mb=1e-4),
        SyncConfig(sync="auto"),
    ],
    ids=("allreduce", "notified", "sharded", "auto"),
)
def test_each_stage_sums_its_own_gradients_along_the_data_axis(
    config: SyncConfig, machines: tuple[int, ...]
) -> None:
    steps = 4
    connections = Connections()
    models = [stage_model(stage) for stage in (0, 1)]  # torch's numbers are of all threads

    def train(own: Communicator) -> list[Tensor]:
        world = world_of(machines, own.rank)
        mesh = Mesh.of(replace(world.generation, stages=2))
        context = open_context(world, connections.connect, device=CPU, limits=LIMITS, mesh=mesh)
        with Run(context=context) as run:
            stage = context.along("stage").rank
            model = copy.deepcopy(models[stage])
            if run.rank_and_size()[0]:
                nn.init.zeros_(model[0].weight)  # rank 0 of its line has the right one
            optimizer = optimizer_of(model)
            replica = replicate(model, optimizer, run, config)
            for step in range(steps):
                x, y = batch_of(stage, step)
                with replica_step(replica, step, 1 / 2, 3):
                    part = slice(run.rank_and_size()[0], None, 2)
                    F.cross_entropy(model(x[part]), y[part]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            replica.settle()
            weights = [p.detach().clone() for p in model.parameters()]
            replica.drain()
            replica.close()
        return weights

    for rank, weights in enumerate(run_ranks(4, train)):
        for own, expected in zip(weights, trained_alone(rank // 2, steps), strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("machines", [(2, 2), (4,)])
def test_windows_along_stages_carry_puts_between_the_stages_of_one_replica(
    machines: tuple[int, ...],
) -> None:
    connections = Connections()

    def exchange(context: GenerationContext) -> tuple[int, list[float]]:
        spec = WindowSpec(axis="stage")
        window = context.window("activations", spec, 8, 1)
        with closing(window):
            stage = context.along("stage").rank
            other = 1 - stage
            own = torch.tensor([float(context.world.rank)], dtype=torch.float64)
            window.put(other, 0, own, 0, 1)
            window.wait(other, 0, 1, limit=10.0, operation="an activation")
            received = window.memory.view(torch.float64).tolist()
            window.flush(other, limit=10.0, operation="an activation")
            context.group("all", "steps").all_reduce(own).wait("the end")
            return window.world_size, received

    def run(own: Communicator) -> tuple[int, list[float]]:
        world = world_of(machines, own.rank)
        mesh = Mesh.of(replace(world.generation, stages=2))
        context = open_context(world, connections.connect, device=CPU, limits=LIMITS, mesh=mesh)
        with context:
            if context.along("stage").rank:  # which opens another window before, in its own line
                context.window("activations", WindowSpec(), 8, 1).close()
            return exchange(context)

    assert run_ranks(4, run) == [(2, [2.0]), (2, [3.0]), (2, [0.0]), (2, [1.0])]
