"""Owners that contribute nothing: workers, and two servers that own half of each bucket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
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

VERSIONS = 40
LENGTHS = ((1000,), (7, 300), (1,))  # of each bucket's parameters; the last has an empty shard
TEMPLATES = [[torch.empty(n) for n in lengths] for lengths in LENGTHS]
NAMES = [[f"parameter {n}" for n in range(len(lengths))] for lengths in LENGTHS]
WEIGHTS = (0.25, 0.75, -2.0)


def late(machines: Sequence[int], size: int, notifications: int) -> Make:
    """Make windows whose puts are late; those of one notification stay in order."""
    group = WindowGroup(sum(machines), size, notifications, machines)
    ordered = range(notifications)
    return lambda rank: FaultyWindow(group.window(rank), Faults(seed=rank, ordered=ordered))


def alone(machines: Sequence[int], size: int, notifications: int) -> Make:
    """Make windows over TCP, for ranks that have a machine each."""
    return tcp(len(machines), size, notifications)


def layout_of(machines: Sequence[int], staleness: int) -> Layout:
    specs = [BucketSpec(lengths=n, dtype=torch.float64, slots=staleness + 1) for n in LENGTHS]
    return lay_out(specs, Topology.of(machines).served_by("server 0", "server 1"))


def gradients(rank: int, version: int, index: int) -> list[Tensor | None]:
    """Draw a worker's gradients; the second parameter of bucket 1 has none in some versions."""
    generator = torch.Generator().manual_seed(1000 * version + 10 * rank + index)
    drawn = [torch.randn(n, generator=generator, dtype=torch.float64) for n in LENGTHS[index]]
    return [d if n == 0 or (rank + version) % 3 else None for n, d in enumerate(drawn)]


def check(workers: int, version: int, index: int, sums: Sequence[Tensor | None]) -> None:
    """Compare a bucket's sums with plain ones."""
    drawn = [gradients(rank, version, index) for rank in range(workers)]
    for number, found in enumerate(sums):
        parts = [(WEIGHTS[rank], one[number]) for rank, one in enumerate(drawn)]
        plain = [weight * part for weight, part in parts if part is not None]
        assert (found is None) == (not plain)
        if found is not None:
            assert torch.allclose(found, sum(plain, torch.zeros(())), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize(("make", "machines"), [(alone, (1, 1)), (late, (1, 1)), (late, (2, 1))])
def test_workers_and_two_servers_sum_and_no_worker_passes_the_staleness(
    make: Callable[[Sequence[int], int, int], Make],
    machines: Sequence[int],
    staleness: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, "_WAIT_SLICE_S", 1000.0)  # it sleeps until it is woken
    layout = layout_of(machines, staleness)
    workers = sum(machines)
    buckets = range(len(LENGTHS))
    sent = [0] * workers
    ahead = threading.Event()  # rank 0 leads as far as it can: the others begin

    def serve(window: Window) -> int:
        with closing(ShardServer(window, layout)) as server:
            server.serve()
            server.release()
            assert server.versions == [VERSIONS] * len(LENGTHS)
            return 0

    def run(window: Window) -> int:
        rank = window.rank
        if rank >= workers:
            return serve(window)
        lead = 0
        timeout = Timeout(LIMIT, LIMIT)
        with closing(PutExchange(window, layout, TEMPLATES, NAMES, timeout)) as own:
            for version in range(1, VERSIONS + 1):
                if rank == 0 and version == staleness + 1:
                    ahead.set()
                assert rank == 0 or ahead.wait(LIMIT)
                lead = max(lead, version - (min(sent) + 1))  # of a worker that is at version + 1
                for index in reversed(buckets):
                    if index == 0:  # before the version counts, and others can read its sums
                        sent[rank] = version
                    own.send(index, gradients(rank, version, index), WEIGHTS[rank], "a step")
                if (read := version - staleness) > 0:
                    found = [own.wait(index, read) for index in buckets]
                    for index in buckets:  # nothing writes them until the next version is sent
                        check(workers, read, index, found[index])
            for version in range(VERSIONS - staleness + 1, VERSIONS + 1):
                for index in buckets:
                    check(workers, version, index, own.wait(index, version))
            own.drain()
        return lead

    windows = make((*machines, 1, 1), layout.server_size, layout.notifications)
    assert max(run_windows(windows, workers + 2, run)) == staleness


def test_a_worker_that_has_not_read_has_no_room_for_another_version() -> None:
    layout = layout_of((1, 1), 2)

    def run(window: Window) -> None:
        if window.rank == 0:
            timeout = Timeout(LIMIT, LIMIT)
            with closing(PutExchange(window, layout, TEMPLATES, NAMES, timeout)) as own:
                for _ in range(3):
                    own.send(0, gradients(0, 1, 0), 1.0, "a step")
                with pytest.raises(AssertionError):
                    own.send(0, gradients(0, 1, 0), 1.0, "a step")

    run_windows(tcp(4, layout.server_size, layout.notifications), 4, run)
