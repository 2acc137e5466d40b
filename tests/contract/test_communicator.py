"""One suite over both communicators: ranks that are threads, and real processes on Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from paceline.comm.communicator import (
    Communicator,
    broadcast_all,
    gather_all,
    gather_bytes,
    total,
)
from paceline.errors import CommError
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.processes.gloo_processes import spawn

Run = Callable[[int, Callable[[Communicator], Any]], list[Any]]


@pytest.fixture(params=[run_ranks, spawn], ids=["threads", "gloo"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param


def sums(c: Communicator) -> list[float]:
    return total(c, torch.arange(4.0, dtype=torch.float64) + c.rank, "a sum").tolist()


def sum_for_rank_0(c: Communicator) -> list[float]:
    tensor = torch.arange(4.0) + c.rank
    c.reduce(tensor).wait("a sum")
    return tensor.tolist()


def first_of_rank_0(c: Communicator) -> list[torch.Tensor]:
    mixed = [
        torch.full((2, 3), float(c.rank)),
        torch.tensor(c.rank + 5),
        torch.full((2, 3, 4, 4), 1.0 + c.rank).to(memory_format=torch.channels_last),
    ]
    broadcast_all(c, mixed, "a broadcast")
    return mixed


class Sizes:
    """A communicator's broadcasts, whose sizes are noted."""

    def __init__(self, communicator: Communicator) -> None:
        self.world_size = communicator.world_size
        self.noted: list[int] = []
        self._communicator = communicator

    def broadcast(self, tensor: torch.Tensor) -> Any:
        self.noted.append(tensor.nbytes)
        return self._communicator.broadcast(tensor)


def large_ones_of_rank_0(c: Communicator) -> tuple[list[int], list[float]]:
    values = float(1 + c.rank)
    layers = [torch.full((size << 20,), values).bfloat16() for size in (3, 4, 2, 10, 1)]
    layers.append(torch.full((5,), values))
    sizes = Sizes(c)
    broadcast_all(cast("Communicator", sizes), layers, "a broadcast")
    return sizes.noted, [float(layer.double().mean()) for layer in layers]


def gathered(c: Communicator) -> list[bytes]:
    return gather_bytes(c, bytes(range(c.rank, 5 * c.rank)), "a gathering")


def overlapping(c: Communicator) -> list[float]:
    tensors = [torch.full((1000,), float(i + c.rank)) for i in range(20)]
    tickets = [c.all_reduce(tensor) for tensor in tensors]
    for ticket in reversed(tickets):
        ticket.wait("one of many")
    return [float(tensor[-1]) for tensor in tensors]


def of_their_own_length(c: Communicator) -> list[list[float]]:
    mine = torch.arange(3.0 * c.rank) - c.rank  # rank 0 has nothing
    return [flat.tolist() for flat in gather_all(c, mine, "a gathering")]


def of_all_ranks(c: Communicator) -> list[list[float]]:
    mine = torch.arange(3.0) + 10 * c.rank
    into = [torch.empty(3) for _ in range(c.world_size)]
    c.all_gather(mine, into).wait("a gathering")
    return [one.tolist() for one in into]


def leaves_early(c: Communicator) -> str:
    if c.rank == 1:
        c.abort()
        return ""
    try:
        total(c, torch.ones(1), "the last sum")
    except CommError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_get_the_sum(run: Run, world_size: int) -> None:
    offset = sum(range(world_size))
    expected = [world_size * i + offset for i in range(4)]
    assert run(world_size, sums) == [expected] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rank_0_gets_the_sum(run: Run, world_size: int) -> None:
    offset = sum(range(world_size))
    first, *_ = run(world_size, sum_for_rank_0)
    assert first == [world_size * i + offset for i in range(4)]


def test_all_ranks_get_rank_0s_tensors_of_any_dtype_and_layout(run: Run) -> None:
    for floats, whole, image in run(3, first_of_rank_0):
        assert floats.eq(0).all()
        assert int(whole) == 5
        assert image.eq(1).all()


def test_tensors_are_broadcast_in_pieces_of_which_each_is_copied_once() -> None:
    for sizes, means in run_ranks(2, large_ones_of_rank_0):
        # In bfloat16: 3 and 4 Mi values are 14 MiB; a tensor with more than 16 MiB travels alone.
        assert sizes == [7 << 21, 2 << 21, 10 << 21, 1 << 21, 20]
        assert means == [1.0] * 6


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_get_everybodys_bytes(run: Run, world_size: int) -> None:
    expected = [b"", bytes([1, 2, 3, 4]), bytes(range(2, 10))][:world_size]
    assert run(world_size, gathered) == [expected] * world_size


@pytest.mark.parametrize("world_size", [1, 3])
def test_rank_0_gets_what_each_rank_has(run: Run, world_size: int) -> None:
    first, *others = run(world_size, of_their_own_length)
    assert first == [[], [-1.0, 0.0, 1.0], [-2.0, -1.0, 0.0, 1.0, 2.0, 3.0]][:world_size]
    assert others == [[]] * (world_size - 1)


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_get_each_ranks_tensor(run: Run, world_size: int) -> None:
    expected = [[10.0 * rank + i for i in range(3)] for rank in range(world_size)]
    assert run(world_size, of_all_ranks) == [expected] * world_size


def test_many_sums_may_be_under_way_and_redeemed_in_any_order(run: Run) -> None:
    assert run(2, overlapping) == [[2.0 * i + 1 for i in range(20)]] * 2


def test_a_peer_that_leaves_is_an_error_that_names_the_operation(run: Run) -> None:
    assert "the last sum" in run(2, leaves_early)[0]
