"""Ranks of two stages that train apart: what asks the axis "data", and what asks "all"."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from paceline.cluster.membership.generation import Group
from paceline.comm.communicator import Communicator
from paceline.config.world import SyncConfig
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
