"""What a window promises (paceline/comm/window.py), of every kind of window.

That nothing is lost or doubled, and data come before their notification: `test_window_traffic.py`.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from paceline.comm.window import Window
from paceline.errors import CommTimeout, PeerLost
from tests.harness.network.window_kinds import KINDS, LIMIT, Make, kinds, run_windows


@pytest.fixture(params=kinds())
def kind(request: pytest.FixtureRequest) -> Callable[[int, int, int], Make]:
    return KINDS[request.param]


def test_a_source_may_be_written_after_a_flush(kind: Callable[[int, int, int], Make]) -> None:
    size = 3_000_000

    def run(window: Window) -> bool:
        if window.rank == 0:
            source = torch.arange(size // 4, dtype=torch.int32)
            window.put(1, 0, source, 0, 1)
            window.flush(1, limit=LIMIT, operation="a flush")
            source.fill_(-1)
            window.wait(1, 0, 1, limit=LIMIT, operation="the answer")
            return True
        window.wait(0, 0, 1, limit=LIMIT, operation="the put")
        right = torch.equal(
            window.memory.view(torch.int32), torch.arange(size // 4, dtype=torch.int32)
        )
        window.put(0, 0, None, 0, 1)
        window.flush(0, limit=LIMIT, operation="a flush")
        return right

    assert run_windows(kind(2, size, 1), 2, run) == [True, True]


def test_a_layout_arrives_as_it_lies_in_memory(kind: Callable[[int, int, int], Make]) -> None:
    image = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)

    def run(window: Window) -> torch.Tensor:
        if window.rank == 0:
            window.put(1, 8, image, 0, 1)
            window.flush(1, limit=LIMIT, operation="a flush")
            window.wait(1, 0, 1, limit=LIMIT, operation="the answer")
            return image
        window.wait(0, 0, 1, limit=LIMIT, operation="the put")
        window.put(0, 0, None, 0, 1)
        window.flush(0, limit=LIMIT, operation="a flush")
        return window.memory[8:].view(torch.float32).as_strided(image.shape, image.stride())

    _, got = run_windows(kind(2, 8 + image.numel() * 4, 1), 2, run)
    assert torch.equal(got, image)


def test_a_silent_peer_is_named_at_the_limit(kind: Callable[[int, int, int], Make]) -> None:
    def run(window: Window) -> None:
        if window.rank == 1:
            start = time.monotonic()
            with pytest.raises(CommTimeout, match=r"^rank 1 waited 0\.2 s for rank 0 in bucket 3"):
                window.wait(0, 0, 1, limit=0.2, operation="bucket 3 of step 7")
            assert time.monotonic() - start < 10
            assert window.wait_for_event(0, 0.05) == 0
            window.put(0, 0, None, 0, 1)
        else:
            window.wait(1, 0, 1, limit=LIMIT, operation="the end")

    run_windows(kind(2, 8, 1), 2, run)


MANY = 20_000  # notifications, of puts that are under way together


def put_until_it_is_noticed(window: Window) -> None:
    for notification in range(1, MANY):
        window.put(0, 0, None, notification, 1)
        threading.Event().wait(0.001)


def test_a_peer_that_closes_is_named_by_whoever_waits(
    kind: Callable[[int, int, int], Make],
) -> None:
    def run(window: Window) -> None:
        if window.rank == 0:
            window.put(1, 0, None, 0, 1)
            window.flush(1, limit=LIMIT, operation="a flush")
            window.wait(1, 0, 1, limit=LIMIT, operation="the answer")
            window.close()
            return
        window.wait(0, 0, 1, limit=LIMIT, operation="the put")
        window.put(0, 0, None, 0, 1)
        with pytest.raises(PeerLost, match="rank 1 lost rank 0 in bucket 3"):
            window.wait(0, 0, 2, limit=LIMIT, operation="bucket 3 of step 7")
        window.wait(0, 0, 1, limit=LIMIT, operation="what has come stays")
        with pytest.raises(PeerLost, match="rank 1 lost rank 0"):
            window.wait_for_event(1, LIMIT)
        with pytest.raises(PeerLost, match="rank 1 lost rank 0 in a put"):
            put_until_it_is_noticed(window)

    run_windows(kind(2, 8, MANY), 2, run)


def test_another_thread_interrupts_all_waits(kind: Callable[[int, int, int], Make]) -> None:
    """The window is still there afterwards: only `close` releases it."""

    def run(window: Window) -> None:
        if window.rank == 0:
            interrupting = threading.Timer(0.05, window.interrupt)
            interrupting.start()
        with pytest.raises(PeerLost, match=r"lost rank [01] in bucket 3"):
            window.wait(1 - window.rank, 0, 1, limit=LIMIT, operation="bucket 3 of step 7")
        with pytest.raises(PeerLost):
            window.wait_for_event(0, LIMIT)
        if window.rank == 0:
            interrupting.join()
            window.interrupt()
            assert window.memory.tolist() == [0] * 8
            window.close()
            window.interrupt()

    run_windows(kind(2, 8, 1), 2, run)


@pytest.mark.parametrize("connected", ["tcp", "tcp by three connections", "shared"])
@pytest.mark.parametrize("first", [1, 2])
def test_of_two_lost_peers_the_first_one_is_named(connected: str, first: int) -> None:
    second = 3 - first

    def run(window: Window) -> None:
        if window.rank == second:
            window.wait(0, 0, 1, limit=LIMIT, operation="the loss of the first")
        if window.rank:
            window.close()
            return
        with pytest.raises(PeerLost, match=f"rank 0 lost rank {first}"):
            window.wait(first, 0, 1, limit=LIMIT, operation="bucket 3")
        window.put(second, 0, None, 0, 1)
        with pytest.raises(PeerLost, match=f"rank 0 lost rank {second}") as lost:
            window.wait(second, 0, 1, limit=LIMIT, operation="bucket 3")
        assert f"rank 0 lost rank {first} in bucket 3" in str(window.lost_first(lost.value))
        with pytest.raises(PeerLost, match=f"rank 0 lost rank {first}"):
            window.wait_for_event(0, LIMIT)

    run_windows(KINDS[connected](3, 8, 1), 3, run)


def test_closing_wakes_this_ranks_own_waits(kind: Callable[[int, int, int], Make]) -> None:
    def run(window: Window) -> None:
        if window.rank == 0:
            window.wait(1, 0, 1, limit=LIMIT, operation="the end")
            return
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                window.wait(0, 0, 1, limit=LIMIT, operation="a wait")
            except PeerLost as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        window.put(0, 0, None, 0, 1)
        window.flush(0, limit=LIMIT, operation="a flush")
        window.close()
        thread.join(LIMIT)
        assert len(errors) == 1

    run_windows(kind(2, 8, 1), 2, run)


def test_several_threads_of_a_rank_wait_at_once(kind: Callable[[int, int, int], Make]) -> None:
    rounds = 300

    def listen(window: Window) -> None:
        events = 0
        while window.values[1 - window.rank, 1] < 1:
            events = window.wait_for_event(events, 0.01)

    def run(window: Window) -> None:
        peer = 1 - window.rank
        threads = [threading.Thread(target=listen, args=(window,), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for value in range(1, rounds + 1):
            window.put(peer, 0, None, 0, value)
            window.wake()
            window.wait(peer, 0, value, limit=LIMIT, operation="a round")
            window.flush(peer, limit=LIMIT, operation="a flush")  # or the next one may overtake
        window.put(peer, 0, None, 1, 1)
        window.flush(peer, limit=LIMIT, operation="a flush")
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()

    with switching_often():
        run_windows(kind(2, 8, 2), 2, run)


def test_a_put_of_one_thread_while_another_closes(kind: Callable[[int, int, int], Make]) -> None:
    def put_on(window: Window, begun: threading.Event) -> None:
        for value in itertools.count(1):
            window.put(0, 0, None, value % 50, value)
            if value % 50 == 0:
                window.flush(0, limit=LIMIT, operation="a flush")
            begun.set()

    def run(window: Window) -> None:
        if window.rank == 0:
            with pytest.raises(PeerLost):
                window.wait(1, 0, sys.maxsize, limit=LIMIT, operation="the end")
            return
        begun = threading.Event()
        with ThreadPoolExecutor() as pool:
            putting = pool.submit(put_on, window, begun)
            assert begun.wait(LIMIT)
            window.close()
            with pytest.raises(PeerLost, match=r"rank 1 lost rank 0 in a .*: this process closed"):
                putting.result(LIMIT)

    with switching_often():
        for _ in range(5):
            run_windows(kind(2, 8, 50), 2, run)


@contextmanager
def switching_often() -> Iterator[None]:
    """Let threads take turns between any two instructions, about."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
