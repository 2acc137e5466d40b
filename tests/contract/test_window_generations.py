"""A generation's windows take nothing from one before: no put, no connection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore

from paceline.comm.handshake import GreetingError, authenticate
from paceline.comm.nixl.window import nixl_window
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.comm.window import Window
from paceline.errors import PeerLost
from tests.harness.network.window_kinds import (
    LIMIT,
    bootstraps,
    installed,
    run_windows,
    shm_window,
    tcp_window,
)
from tests.harness.network.window_traffic import Traffic

LANES, ROUNDS = [300, 40, 5000], 100
SIZE, NOTIFICATIONS = 3 * sum(LANES), 2 * len(LANES)
LATE = 0xEE  # the only byte that the past generation writes

Open = Callable[[Bootstrap], Window]
KINDS: dict[str, Open] = {
    "tcp": lambda bootstrap: tcp_window(bootstrap, "127.0.0.1", SIZE, NOTIFICATIONS),
    "shared": lambda bootstrap: shm_window(bootstrap, SIZE, NOTIFICATIONS),
    "nixl": lambda bootstrap: nixl_window(bootstrap, "127.0.0.1", SIZE, NOTIFICATIONS),
}


@pytest.fixture(params=installed(KINDS))
def open_window(request: pytest.FixtureRequest) -> Open:
    return KINDS[request.param]


def generation(number: int, store: HashStore, open_window: Open) -> Callable[[int], Window]:
    """Return what opens the windows of a generation, in the same store as the one before."""
    at = bootstraps(3, purpose=f"window/{number}", store=store)
    return lambda rank: open_window(at[rank])


def put_late(stopped: Window, lost: set[str], over: threading.Event) -> set[str]:
    """Put everywhere, as a process that slept, until it is over and so many peers were lost."""
    everything = torch.full((SIZE,), LATE, dtype=torch.uint8)
    subscribed = set()
    for value in range(1, 10**9):
        for peer in (1, 2):
            shared = stopped.peer_memory(peer)
            if shared is not None:
                shared.fill_(LATE)
            try:
                stopped.put(peer, 0, everything, value % NOTIFICATIONS, value)
                stopped.flush(peer, limit=LIMIT, operation="a late flush")
            except PeerLost as error:
                subscribed.add(str(error)[:18])
        if over.is_set() and subscribed >= lost:
            return subscribed
    raise AssertionError


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "left standing"])
def test_a_rank_that_goes_on_putting_changes_nothing_in_the_next_generation(
    open_window: Open, closed: bool
) -> None:
    store = HashStore()
    old: dict[int, Window] = {}
    run_windows(
        generation(1, store, open_window),
        3,
        lambda window: old.update({window.rank: window}),
        close=False,
    )
    lost = {"rank 0 lost rank 1", "rank 0 lost rank 2"} if closed else set()
    over = threading.Event()
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        for window in old.values():
            stack.callback(window.close)
        for survivor in (old[1], old[2]) if closed else ():
            survivor.close()
        left = [survivor.memory.clone() for survivor in (old[1], old[2])]
        stack.callback(over.set)
        late = pool.submit(put_late, old[0], lost, over)

        def run(window: Window) -> int:
            return Traffic(window, LANES, ROUNDS, 3).run()

        came = run_windows(generation(2, store, open_window), 3, run)
        over.set()
        assert came == [2 * ROUNDS * len(LANES) * 2] * 3
        assert late.result(LIMIT) == lost
        for survivor, before in zip((old[1], old[2]), left, strict=True):
            if not closed:  # here they went
                survivor.wait(0, 1, 1, limit=LIMIT, operation="a late put")
                assert torch.all(survivor.memory == LATE)
            elif (
                old[0].peer_memory(survivor.rank) is None
            ):  # whose memory the next one may be given
                assert torch.equal(survivor.memory, before)


def call(where: str) -> socket.socket:
    """Connect as the ranks of either kind of window do."""
    if " " in where:
        host, port = where.split()
        return socket.create_connection((host, int(port)), LIMIT)
    end = socket.socket(socket.AF_UNIX)
    end.settimeout(LIMIT)
    end.connect(f"\0{where}")
    return end


def test_a_rank_of_the_past_generation_is_shown_out(open_window: Open) -> None:
    store = HashStore()
    at, past = (bootstraps(2, purpose=f"window/{n}", store=store) for n in (2, 1))
    inside = "/machine" if open_window is KINDS["shared"] else ""
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        first = pool.submit(open_window, at[0])
        ghost = call(store.get(f"window/2{inside}/0").decode())
        stack.callback(ghost.close)
        identity = replace(past[1], purpose=f"window/1{inside}").identity
        with pytest.raises(GreetingError):
            authenticate(ghost, identity, "0", time.monotonic() + LIMIT)
        second = open_window(at[1])
        for window in (first.result(LIMIT), second):
            stack.callback(window.close)
        second.put(0, 0, torch.ones(4), 0, 1)
        first.result().wait(1, 0, 1, limit=LIMIT, operation="a put")
