"""What a cut connection leaves: what was notified before is whole, and nothing comes after it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from paceline.comm.connection_window import ConnectionWindow
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.comm.transport.event_loop import HEAD
from paceline.comm.transport.transport import CHUNK
from paceline.comm.window import Window
from paceline.errors import PeerLost
from tests.harness.network.cut_relay import Relay
from tests.harness.network.window_kinds import (
    KINDS,
    LIMIT,
    bootstraps,
    kinds,
    run_windows,
    tcp_window,
)
from tests.harness.network.window_traffic import Traffic
from tests.harness.twins.faulty_window import Faults, FaultyWindow
from tests.harness.twins.stored_addresses import StoredAddresses

PUTS = [0, 1, 1000, 8, 600_000, 0, 300_000, CHUNK, 77, 2 * CHUNK]  # bytes
SIZE = sum(PUTS)


def windows_over_a_wire(cut_after: int) -> tuple[list[ConnectionWindow], Relay]:
    """Connect two ranks by a wire that is cut after so many bytes of rank 1's."""
    at = bootstraps(2)
    windows: dict[int, ConnectionWindow] = {}

    def join(bootstrap: Bootstrap) -> None:
        windows[bootstrap.rank] = tcp_window(bootstrap, "127.0.0.1", SIZE, len(PUTS))

    thread = threading.Thread(target=join, args=(at[0],))
    thread.start()
    relay = Relay(at[1].addresses.find("window/1", 0), cut_after)
    store = HashStore()
    store.set("window/1/0", relay.where)
    join(replace(at[1], addresses=StoredAddresses(store)))
    thread.join()
    return [windows[0], windows[1]], relay


def expected(data: np.ndarray, passed: int) -> tuple[np.ndarray, list[int]]:
    """Return rank 0's memory, and its values of rank 1, when so many bytes have passed."""
    memory, values, at = np.zeros(SIZE, np.uint8), [0] * len(PUTS), 0
    for number, size in enumerate(PUTS):
        for frame in range(0, max(size, 1), CHUNK):
            part = min(CHUNK, size - frame)
            here = min(part, max(0, passed - HEAD))
            memory[at : at + here] = data[at : at + here]
            at, passed = at + part, passed - HEAD - part
        values[number] = int(passed >= 0)
    return memory, values


@pytest.mark.parametrize("seed", range(12))
def test_a_stream_that_is_cut_at_a_byte_has_written_and_notified_what_passed(seed: int) -> None:
    generator = random.Random(seed)
    data = torch.from_numpy(np.random.default_rng(seed).integers(1, 256, SIZE, np.uint8))
    passed = generator.choice([generator.randrange(2000), generator.randrange(SIZE)])
    (window, putting), relay = windows_over_a_wire(passed)
    at = 0
    for number, size in enumerate(PUTS):
        try:
            putting.put(0, at, data[at : at + size], number, 1)
        except PeerLost:
            break
        at += size
    with pytest.raises(
        PeerLost, match="rank 0 lost rank 1 in bucket 3: the peer closed the connection"
    ):
        window.wait(1, 0, 2, limit=LIMIT, operation="bucket 3")
    with pytest.raises(PeerLost, match="rank 1 lost rank 0 in bucket 3"):
        putting.wait(0, 0, 1, limit=LIMIT, operation="bucket 3")
    memory, values = expected(data.numpy(), passed)
    assert window.values[1].tolist() == values
    assert np.array_equal(window.memory.numpy(), memory)
    relay.close()
    for end in (window, putting):
        end.close()


def cut_off(make: Callable[[int], Window], cut_after: int) -> Callable[[int], Window]:
    """Cut rank 0's window off after so many puts."""

    def make_one(rank: int) -> Window:
        cut = Faults(delay=0.0, cut_after=cut_after)
        return FaultyWindow(make(rank), cut) if rank == 0 else make(rank)

    return make_one


@pytest.mark.parametrize(("world_size", "cut_after"), [(2, 0), (2, 37), (4, 1), (4, 200)])
@pytest.mark.parametrize("kind", kinds("fault"))
def test_all_lose_a_rank_that_is_cut_off_in_the_traffic(
    kind: str, world_size: int, cut_after: int
) -> None:
    lanes, rounds = [300, 40, 5000], 50
    make = KINDS[kind](world_size, world_size * sum(lanes), 2 * len(lanes))

    def run(window: Window) -> str:
        traffic = Traffic(window, lanes, rounds, cut_after)
        with pytest.raises(PeerLost) as lost:
            traffic.run()
        before = window.values.copy()
        peer = 0 if window.rank else 1
        with pytest.raises(PeerLost, match=f"rank {window.rank} lost rank {peer} in the next"):
            window.wait(peer, 0, rounds + 1, limit=LIMIT, operation="the next")
        traffic.check_after_a_cut()
        assert np.array_equal(window.values[0], before[0])
        return str(lost.value)

    said = run_windows(cut_off(make, cut_after), world_size, run)
    assert [message[:18] for message in said[1:]] == [
        f"rank {rank} lost rank 0" for rank in range(1, world_size)
    ]
