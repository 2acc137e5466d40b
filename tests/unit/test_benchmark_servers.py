"""The benchmark of parameter servers: what shares a start, and the worlds that it refuses."""

from __future__ import annotations

import argparse

import pytest

from tests.harness.documents.benchmark_runs import load

servers = load("servers")


def test_a_start_has_one_row_of_paceline_and_one_of_rpc_beside_the_stream() -> None:
    rows = ["server", "server:4", "server-2", "rpc", "rpc:4", "ddp"]
    assert servers.starts(rows) == [
        ["line", "server", "rpc", "ddp"],
        ["line", "server:4", "rpc:4"],
        ["line", "server-2"],
    ]


@pytest.mark.parametrize("text", ["1x1", "2x0", "2", "two"])
def test_a_world_without_two_workers_and_a_server_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="isn't WORKERSxSERVERS"):
        servers.World.named(text)


def test_a_server_s_rate_is_that_of_its_part_of_all_workers_bytes() -> None:
    layers = 1_000_000_000 // 8 // servers.LAYER_BYTES  # about a gigabit a worker
    assert servers._gbit(1000, servers.World(4, 2), layers) == pytest.approx(2, rel=0.01)


def test_a_timed_step_of_bounded_staleness_leaves_as_many_under_way_as_it_began_with() -> None:
    ranks = load("server_ranks")
    rows = ("line", "ddp", "server:4", "server-2", "server-async")
    assert [ranks.steps_of(row) for row in rows] == [1, 1, 1, 3, 1]
