"""Ranks of one world: what they share, and the sentence where their scripts differ."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import CommError, ConfigError
from paceline.comm.communicator import Communicator
from paceline.session.sources import cores_per_worker
from tests.harness.library.small_training import BATCH, loss_of, network, place, samples, sgd
from tests.harness.network.ports import free_ports
from tests.harness.processes.gloo_processes import spawn

CASES = {
    "seed": r"^seed is 0 on rank 0 \(.*\) and 1 on rank 1",
    "run": r"^run is given on rank 0 .* and not given on rank 1",
    "model": r"^the model's 0.weight is \[16, 6\] float64 on rank 0 .* and \[16, 7\] float64",
    "layout": r"^the gradient of the model's 0.table.weight is sparse on rank 0 .* and dense on",
    "optimizer": r"^the optimizer is SGD on rank 0 .* and Adam on rank 1",
    "sync": r"^sync is auto on rank 0 .* and notified on rank 1",
    "rate": r"^lr of the optimizer's group 0 is 0.1 on rank 0 .* and 0.2 on rank 1",
    "order": r"^parameter 0 of the optimizer's group 0 is 0.weight on rank 0 .* and 4.bias on",
    "data": r"^the data set's length is 50 on rank 0 .* and 51 on rank 1",
    "batch": r"^batch_size is 12 on rank 0 .* and 13 on rank 1",
}


def differ(communicator: Communicator, ports: list[int], folder: Path) -> dict[str, str]:
    """Differ from rank 0 in each way, a world each; return what is said."""
    said, worlds = {}, []
    for what, port in zip(CASES, ports, strict=True):
        place(communicator, port)
        odd = what if communicator.rank > 0 else ""
        try:
            differ_in(odd, folder / what)
        except ConfigError as error:
            said[what] = str(error)
            worlds.append(sys.excepthook)  # which holds the world's store until the others read it
    return said


def differ_in(odd: str, run: Path) -> None:
    given = run if run.name == "run" and odd != "run" else None
    with paceline.join(given, seed=int(odd == "seed")) as world:
        model: Any = network(words=run.name == "layout")
        if odd == "layout":
            model[0].table.sparse = False
        if odd == "model":
            model[0] = nn.Linear(7, 16).double()
        optimizer = sgd(model)
        if odd == "rate":
            optimizer.param_groups[0]["lr"] = 0.2
        if odd == "optimizer":
            optimizer = torch.optim.Adam(model.parameters())
        if odd == "order":  # as of a list that was made of a set
            optimizer.param_groups[0]["params"].reverse()
        sync = "notified" if odd == "sync" else "auto"
        paceline.parallelize(model, optimizer, world, sync=sync)
        paceline.loader(samples(50 + (odd == "data")), BATCH + (odd == "batch"), world)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return spawn(2, differ, free_ports(len(CASES)), tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("what", CASES)
def test_ranks_differ_in(what: str, said: list[dict[str, Any]]) -> None:
    assert said[0][what] == said[1][what]
    assert re.search(CASES[what], said[0][what]), said[0][what]


def joined(communicator: Communicator, port: int) -> tuple[int, int, int]:
    place(communicator, port)
    torch.set_num_threads(cores_per_worker(1))
    with paceline.join() as world:
        return world.local_rank, world.local_world_size, torch.get_num_threads()


def test_the_ranks_of_a_machine_share_its_cores() -> None:
    threads = cores_per_worker(2)
    assert spawn(2, joined, free_ports(1)[0]) == [(0, 2, threads), (1, 2, threads)]


def end_early(communicator: Communicator, ports: list[int]) -> list[str]:
    """Let rank 1 end before rank 0 does, in two ways; return the sentences."""
    said, worlds = [], []
    for port, alone in zip(ports, (a_step_alone, a_total_alone), strict=True):
        place(communicator, port)
        try:
            with paceline.join(timeout=20) as world:
                alone(world)
        except CommError as error:
            said.append(str(error))
        worlds.append(sys.excepthook)
    return said


def a_step_alone(world: paceline.World) -> None:
    model = network()
    optimizer = sgd(model)
    paceline.parallelize(model, optimizer, world, sync="allreduce")
    for _ in range(3 + (world.rank == 0)):
        with world.step(samples=4):
            loss_of(model, *samples(4)[:]).backward()
            optimizer.step()


def a_total_alone(world: paceline.World) -> None:
    if world.rank == 0:
        world.total(torch.ones(1))


def test_a_rank_that_ended_early_is_named_with_its_steps() -> None:
    step, total = spawn(2, end_early, free_ports(2))[0]
    where = r"^rank 1 on machine 0 \(.*\) closed its world after"
    assert re.search(rf"{where} 3 steps and is missing from the next step: all ranks", step), step
    assert re.search(rf"{where} 0 steps and is missing from world\.total\(\): all", total), total


def total_of_one_rank(communicator: Communicator, ports: list[int]) -> list[str]:
    """Call `world.total()` on one rank in mid-training; return each rank's sentences."""
    said, worlds = [], []
    for caller, port in enumerate(ports):
        place(communicator, port)
        model = network()
        optimizer = sgd(model)
        try:
            with paceline.join(timeout=2) as world:
                paceline.parallelize(model, optimizer, world, sync="allreduce")
                for step in range(6):
                    with world.step(samples=4):
                        loss_of(model, *samples(4)[:]).backward()
                        optimizer.step()
                    if step == 3 and world.rank == caller:
                        world.total(torch.ones(7))
        except (CommError, ConfigError) as error:
            said.append(str(error))
        worlds.append(sys.excepthook)
    return said


@pytest.mark.filterwarnings("ignore:.*no_sync")
def test_a_total_of_one_rank_alone_is_named_on_all() -> None:
    said = spawn(2, total_of_one_rank, free_ports(2))
    for caller in (0, 1):
        for rank, sentence in enumerate(said):
            own, other = ("world.total()", "world.step()")[:: 1 if rank == caller else -1]
            assert (
                f"{own} was called on rank {rank} and {other} on rank {1 - rank}"
                in (sentence[caller])
            )


def totals_that_differ(communicator: Communicator, port: int) -> list[str]:
    place(communicator, port)
    said = []
    with paceline.join(timeout=20) as world:
        for own in (
            torch.ones(2 + world.rank),
            torch.ones(2, dtype=(torch.int8, torch.int64)[world.rank]),
        ):
            try:
                world.total(own)
            except ConfigError as error:
                said.append(str(error))
        assert world.total(torch.ones(2)).tolist() == [2, 2]
        assert world.total(torch.ones((1,) * 30)).item() == 2  # whose shape is a long text
    return said


def test_totals_of_other_shapes_and_dtypes_are_named() -> None:
    (shape, dtype), _ = spawn(2, totals_that_differ, free_ports(1)[0])
    assert "shape (2,) on rank 0 and torch.float32 of shape (3,) on rank 1" in shape
    assert "torch.int8 of shape (2,) on rank 0 and torch.int64 of shape (2,) on rank 1" in dtype
