"""Owners that contribute nothing: two workers, and two servers that own half of each bucket."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from torch import Tensor

from paceline.comm.peer_activities import Timeout
from paceline.comm.window import Window
from paceline.reduce.put_engine import owner
from paceline.reduce.put_engine.layout import BucketSpec, Layout, Topology, lay_out
from paceline.reduce.put_engine.put_exchange import PutExchange
from paceline.reduce.put_engine.shard_server import ShardServer
from tests.harness.network.window_kinds import LIMIT, Make, run_windows, tcp
from tests.harness.twins.faulty_window import Faults, FaultyWindow
from tests.harness.twins.window import WindowGroup

WORKERS, VERSIONS = 2, 40
LENGTHS = ((1000,), (7, 300), (1,))  # of each bucket's parameters; the last has an empty shard
TEMPLATES = [[torch.empty(n) for n in lengths] for lengths in LENGTHS]
NAMES = [[f"parameter {n}" for n in range(len(lengths))] for lengths in LENGTHS]
WEIGHTS = (0.25, 0.75)


def late(world_size: int, size: int, notifications: int) -> Make:
    """Make windows whose puts are late; those of one notification stay in order."""
    group = WindowGroup(world_size, size, notifications)
    ordered = range(notifications)
    return lambda rank: FaultyWindow(group.window(rank), Faults(seed=rank, ordered=ordered))


def layout_of(staleness: int) -> Layout:
    specs = [BucketSpec(lengths=n, dtype=torch.float64, rooms=staleness + 1) for n in LENGTHS]
    return lay_out(specs, Topology.of([1] * WORKERS).served_by("server 0", "server 1"))


def gradients(rank: int, version: int, index: int) -> list[Tensor | None]:
    """Draw a worker's gradients; the second parameter of bucket 1 has none in some versions."""
    generator = torch.Generator().manual_seed(1000 * version + 10 * rank + index)
    drawn = [torch.randn(n, generator=generator, dtype=torch.float64) for n in LENGTHS[index]]
    return [d if n == 0 or (rank + version) % 3 else None for n, d in enumerate(drawn)]


def plain_sums(version: int, index: int) -> list[Tensor | None]:
    sums: list[Tensor | None] = [None] * len(LENGTHS[index])
    for rank, weight in enumerate(WEIGHTS):
        for number, gradient in enumerate(gradients(rank, version, index)):
            if gradient is not None:
                before = sums[number]
                sums[number] = weight * gradient + (0 if before is None else before)
    return sums


def run_served(
    make: Callable[[int, int, int], Make], staleness: int, hold: Callable[[int, int], None]
) -> list[list[int]]:
    """Exchange, with checks of all sums; return each worker's lead when it began a version.

    A worker that has sent v versions is at version v + 1.

    Args:
        make: makes the windows of a world.
        staleness: versions that a worker sends before it needs the first.
        hold: called before a worker sends a version, with both; returns when it may.
    """
    layout = layout_of(staleness)
    sent = [0] * WORKERS

    def run(window: Window) -> list[int]:
        if window.rank >= WORKERS:
            with closing(ShardServer(window, layout)) as server:
                server.serve()
                server.release()
                assert server.versions == [VERSIONS] * len(LENGTHS)
                return []
        rank = window.rank
        timeout = Timeout(LIMIT, LIMIT)
        leads = []
        with closing(PutExchange(window, layout, TEMPLATES, NAMES, timeout)) as own:
            for version in range(1, VERSIONS + staleness + 1):
                if version <= VERSIONS:
                    hold(rank, version)
                    leads.append(version - (min(sent) + 1))
                    for index in reversed(range(len(LENGTHS))):
                        values = gradients(rank, version, index)
                        if index == 0:  # before it counts: then the other may read all sums
                            sent[rank] = version
                        assert own.send(index, values, WEIGHTS[rank], "a step") == version
                if (read := version - staleness) > 0:
                    for index in range(len(LENGTHS)):
                        sums = own.wait(index, read)
                        for total, plain in zip(sums, plain_sums(read, index), strict=True):
                            assert (total is None) == (plain is None)
                            if total is not None and plain is not None:
                                assert torch.allclose(total, plain, rtol=1e-12, atol=1e-12)
            own.drain()
        return leads

    windows = make(WORKERS + 2, layout.server_size, layout.notifications)
    return run_windows(windows, WORKERS + 2, run)[:WORKERS]


@pytest.mark.parametrize("make", [tcp, late])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_two_workers_and_two_servers_sum_and_no_worker_passes_the_staleness(
    make: Callable[[int, int, int], Make], staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_WAIT_SLICE_S", 1000.0)  # it sleeps until it is woken
    ahead = threading.Event()

    def hold(rank: int, version: int) -> None:
        """Let rank 0 lead as far as it can; rank 1 begins once it does."""
        if rank == 0 and version == 1 + staleness:
            ahead.set()
        elif rank == 1:
            assert ahead.wait(LIMIT)

    leads = run_served(make, staleness, hold)
    assert max(map(max, leads)) == staleness


def test_a_worker_that_has_not_read_has_no_room_for_another_version() -> None:
    layout = layout_of(2)

    def run(window: Window) -> None:
        if window.rank == 0:
            timeout = Timeout(LIMIT, LIMIT)
            with closing(PutExchange(window, layout, TEMPLATES, NAMES, timeout)) as own:
                for _ in range(3):
                    own.send(0, gradients(0, 1, 0), 1.0, "a step")
                with pytest.raises(AssertionError):
                    own.send(0, gradients(0, 1, 0), 1.0, "a step")

    run_windows(tcp(4, layout.server_size, layout.notifications), 4, run)
