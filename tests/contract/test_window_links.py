"""Windows over connections: urgency, strangers, nonsense."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.comm.connection_window import ConnectionWindow
from paceline.comm.handshake import GreetingError, authenticate
from paceline.comm.transport import event_loop as loop
from paceline.comm.transport import transport
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.comm.transport.event_loop import HEAD
from paceline.comm.transport.shared_memory import connect_locally, share_memory
from paceline.comm.transport.tcp import connect_by_tcp
from paceline.comm.window import Window
from paceline.errors import CommTimeout, PeerLost
from tests.harness.network.window_kinds import LIMIT, bootstraps, run_windows, tcp, tcp_window

LARGE = 64_000_000  # bytes, far more than sockets and the kernel hold


def test_an_urgent_put_overtakes_those_that_wait() -> None:
    def run(window: Window) -> bool:
        if window.rank == 0:
            bulk = torch.ones(LARGE, dtype=torch.uint8)
            window.put(1, 0, bulk, 0, 1, priority=5)
            window.put(1, 0, bulk, 1, 1, priority=5)
            window.put(1, LARGE, torch.full((8,), 7, dtype=torch.uint8), 2, 1, priority=1)
            window.wait(1, 0, 1, limit=LIMIT, operation="the answer")
            return True
        window.wait(0, 2, 1, limit=LIMIT, operation="the urgent one")
        first = window.values[0, 1] == 0  # the second large one isn't there
        assert window.memory[LARGE:].tolist() == [7] * 8
        for large in (0, 1):
            window.wait(0, large, 1, limit=LIMIT, operation="a large one")
        window.put(0, 0, None, 0, 1)
        window.flush(0, limit=LIMIT, operation="a flush")
        return bool(first)

    assert run_windows(tcp(2, LARGE + 8, 3), 2, run) == [True, True]


def window_and_sockets(size: int, connections: int) -> tuple[ConnectionWindow, list[socket.socket]]:
    """Return rank 0's window and the other ends of its connections."""
    at = bootstraps(2)
    with ThreadPoolExecutor() as pool:
        ends = pool.submit(connect_by_tcp, at[1], "127.0.0.1", connections)
        window = tcp_window(at[0], "127.0.0.1", size, 2, connections)
        return window, ends.result()[0]


def window_and_socket(size: int) -> tuple[ConnectionWindow, socket.socket]:
    """Return rank 0's window and the other end of its only connection."""
    window, (end,) = window_and_sockets(size, 1)
    return window, end


def frame(*words: int) -> bytes:
    return torch.tensor([0x50616365, *words]).numpy().tobytes()


def test_a_notification_counts_when_all_connections_have_brought_it() -> None:
    window, ends = window_and_sockets(1024, 3)
    for end in (ends[2], ends[0]):
        end.sendall(frame(0, 0, 0, 7) + frame(0, 0, 0, 8))
    with pytest.raises(CommTimeout):
        window.wait(1, 0, 7, limit=0.2, operation="a put")
    ends[0].close()  # it has said all
    ends[1].sendall(frame(8, 4, 0, 7) + b"\1" * 4)
    window.wait(1, 0, 7, limit=LIMIT, operation="a put")
    assert window.memory[8:12].tolist() == [1] * 4
    assert window.values.tolist() == [[0, 0], [7, 0]]
    ends[1].sendall(frame(0, 0, 0, 8))
    window.wait(1, 0, 8, limit=LIMIT, operation="a put")
    for end in ends[1:]:
        end.close()
    with pytest.raises(PeerLost, match="the peer closed the connection"):
        window.wait(1, 0, 9, limit=LIMIT, operation="a put")
    window.close()


def test_small_puts_of_a_notification_all_go_by_its_own_connection() -> None:
    window, ends = window_and_sockets(8, 3)
    for value in range(1, 20):
        window.put(1, 0, torch.full((8,), value, dtype=torch.uint8), 1, value)
    window.flush(1, limit=LIMIT, operation="a flush")
    window.close()
    assert [len(said_by(end)) for end in ends] == [19 * HEAD, 19 * (HEAD + 8), 19 * HEAD]


def test_a_put_keeps_its_sources_until_all_of_them_have_left() -> None:
    window, (end,) = window_and_sockets(8, 1)
    sources = [torch.ones(8), torch.ones(LARGE // 4)]
    kept = [weakref.ref(source) for source in sources]
    window.put(1, 0, sources, 0, 1)
    del sources
    assert len(end.recv(HEAD + 32, socket.MSG_WAITALL)) == HEAD + 32  # all of the first
    for _ in range(2):
        window.wait_for_event(0, 0.1)
    assert all(one() is not None for one in kept)
    with ThreadPoolExecutor() as pool:
        said = pool.submit(said_by, end)
        window.flush(1, limit=LIMIT, operation="a flush")
        window.wait_for_event(0, 0.0)
        left = [one() for one in kept]
        window.close()
    assert left == [None, None]
    assert len(said.result()) > LARGE


def test_who_puts_and_never_waits_lets_go_of_sources_as_well() -> None:
    window, (end,) = window_and_sockets(8, 1)
    kept: list[weakref.ref[torch.Tensor]] = []
    for value in range(1, 200):
        source = torch.ones(8)
        kept.append(weakref.ref(source))
        window.put(1, 0, source, 0, value)
        assert len(end.recv(HEAD + 32, socket.MSG_WAITALL)) == HEAD + 32
    assert sum(one() is not None for one in kept) < 50
    window.close()
    end.close()


def said_by(end: socket.socket) -> bytes:
    """Receive all that is said, and close."""
    with end, end.makefile("rb") as stream:
        return stream.read()


def test_a_peer_that_closes_one_of_its_connections_only_is_lost_soon() -> None:
    window, ends = window_and_sockets(1024, 2)
    ends[1].close()

    def wait() -> None:
        for _ in range(100):
            with suppress(CommTimeout):
                window.wait(1, 0, 1, limit=0.5, operation="a put")

    with pytest.raises(PeerLost, match="the peer closed the connection"):
        wait()
    ends[0].close()
    window.close()


def test_a_loop_that_fails_loses_all_peers_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(loop, "run", run)
    window, (end,) = window_and_sockets(1024, 1)
    with pytest.raises(PeerLost, match=r"lost rank 1 in a put: .* \(RuntimeError: no compiler\)"):
        window.wait(1, 0, 1, limit=LIMIT, operation="a put")
    end.close()
    window.close()


def test_the_event_loop_is_compiled_before_anything_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    callers: list[str] = []
    run = loop.run

    def noted(*arrays: object) -> None:
        callers.append(threading.current_thread().name)
        run(*arrays)

    monkeypatch.setattr(loop, "run", noted)
    window, (end,) = window_and_sockets(1024, 1)
    end.close()
    window.close()
    assert callers == [threading.current_thread().name, "transport"]


def test_a_loop_that_ends_after_close_keeps_its_descriptors_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go = threading.Event(), threading.Event()

    def run(state: NDArray[np.int64], *arrays: object) -> None:
        if threading.current_thread().name == "transport":
            opened.append(int(state[loop.CONTROL]))
            begun.set()
            go.wait(LIMIT)

    opened: list[int] = []
    monkeypatch.setattr(loop, "run", run)
    monkeypatch.setattr(transport, "_CLOSE_S", 0.05)
    window, (end,) = window_and_sockets(1024, 1)
    assert begun.wait(LIMIT)
    before = os.readlink(f"/proc/self/fd/{opened[0]}")
    window.close()
    assert os.readlink(f"/proc/self/fd/{opened[0]}") == before
    end.settimeout(LIMIT)
    assert end.recv(1) == b""  # the peer learns it at once
    with pytest.raises(PeerLost, match="this process closed"):
        window.wait(1, 0, 1, limit=LIMIT, operation="a put")
    go.set()
    window.close()
    target = Path(f"/proc/self/fd/{opened[0]}")
    assert not target.is_symlink() or os.readlink(target) != before
    end.close()


@pytest.mark.parametrize("mistake", ["a cut", "nonsense"])
def test_one_broken_connection_loses_the_peer(mistake: str) -> None:
    window, ends = window_and_sockets(1024, 3)
    if mistake == "a cut":
        ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ends[1].close()
    else:
        ends[1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n")
    with pytest.raises(PeerLost, match=r"reset by peer|an invalid put header"):
        window.wait(1, 0, 1, limit=LIMIT, operation="a put")
    for end in ends:
        end.close()
    window.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
        [1, 0, 8, 0, 1],  # another magic
        [0x50616365, 1000, 32, 0, 1],  # beyond the memory
        [0x50616365, -8, 8, 0, 1],
        [0x50616365, 0, -1, 0, 1],
        [0x50616365, 0, 8, 2, 1],  # a notification that isn't there
        [0x50616365, 0, 8, -2, 1],
        [0x50616365, 0, 2**40, 0, 1],
        [0x50616365, 2**63 - 8, 16, 0, 1],  # whose end is a negative number
    ],
    ids=str,
)
def test_what_is_no_put_ends_the_connection_and_writes_nothing(said: bytes | list[int]) -> None:
    window, end = window_and_socket(1024)
    data = said if isinstance(said, bytes) else torch.tensor(said).numpy().tobytes()
    end.sendall(data + b"\1" * 64)
    with pytest.raises(
        PeerLost, match="rank 0 lost rank 1 in bucket 3: protocol error: the peer sent"
    ):
        window.wait(1, 0, 1, limit=LIMIT, operation="bucket 3")
    assert not window.memory.any()
    assert not window.values.any()
    window.close()
    end.close()


def test_a_peer_that_ends_in_the_middle_of_a_put_is_lost_and_notifies_nothing() -> None:
    window, end = window_and_socket(1024)
    end.sendall(frame(0, 512, 0, 1) + b"\1" * 100)
    end.close()
    with pytest.raises(PeerLost, match="the peer closed the connection"):
        window.wait(1, 0, 1, limit=LIMIT, operation="bucket 3")
    assert not window.values.any()
    window.close()


def shown_out(stranger: socket.socket) -> bool:
    stranger.settimeout(LIMIT)
    try:
        return stranger.recv(100) == b""
    except ConnectionResetError:  # it hadn't been listened to to the end
        return True


def test_a_stranger_is_shown_out_and_the_ranks_meet() -> None:
    at = bootstraps(2)
    windows: dict[int, ConnectionWindow] = {}

    def join(rank: int) -> None:
        windows[rank] = tcp_window(at[rank], "127.0.0.1", 64, 1)

    first = threading.Thread(target=join, args=(0,))
    first.start()
    host, port = at[1].addresses.find("window/1", 0).split()
    strangers = [socket.create_connection((host, int(port)), LIMIT) for _ in range(4)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n" + b"\0" * 100)
    other = Bootstrap(**{**vars(at[1]), "token": "another job's"})
    for stranger, identity in ((strangers[1], other.identity), (strangers[2], at[0].identity)):
        with pytest.raises(GreetingError):  # rank 0 waits for no rank 0
            authenticate(stranger, identity, "0", time.monotonic() + LIMIT)
    strangers[1].sendall(bytes(32))  # in place of the proof
    strangers[3].close()
    join(1)
    first.join()
    windows[1].put(0, 0, torch.ones(4), 0, 1)
    windows[0].wait(1, 0, 1, limit=LIMIT, operation="a put")
    assert all(map(shown_out, strangers[:3]))
    for stranger in strangers:
        stranger.close()
    for window in windows.values():
        window.close()


def test_another_jobs_rank_is_no_peer() -> None:
    ours = bootstraps(2)[0]
    theirs = Bootstrap(**{**vars(ours), "rank": 1, "token": "another job's"})
    errors: list[BaseException] = []

    def join(bootstrap: Bootstrap) -> None:
        try:
            tcp_window(bootstrap, "127.0.0.1", 64, 1)
        except (PeerLost, CommTimeout) as error:
            errors.append(error)

    patient = Bootstrap(**{**vars(ours), "limit": 5.0})
    thread = threading.Thread(target=join, args=(patient,))
    thread.start()
    join(theirs)
    thread.join()
    said = sorted(map(str, errors))
    assert said[0].startswith("rank 0 timed out after 5 s waiting for a connection from rank 1")
    assert said[1].startswith("rank 1: the process at 127.0.0.1 ")
    assert said[1].endswith(" is not rank 0 of this job (authentication failed).")


def test_a_rank_that_doesnt_come_is_named() -> None:
    at = bootstraps(3, limit=0.3)
    with pytest.raises(
        CommTimeout, match=r"^rank 0 timed out .* waiting for a connection from ranks 1, 2; "
    ):
        tcp_window(at[0], "127.0.0.1", 64, 1)


def test_a_stranger_that_says_nothing_keeps_nobody_beyond_the_limit() -> None:
    ours, theirs = bootstraps(2, limit=0.3)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(tcp_window, ours, "127.0.0.1", 64, 1)
        host, port = theirs.addresses.find("window/1", 0).split()
        said = r"^rank 0 timed out .* waiting for a connection from rank 1; "
        with (
            socket.create_connection((host, int(port)), LIMIT),
            pytest.raises(CommTimeout, match=said),
        ):
            waiting.result()


@pytest.mark.parametrize("end", ["is gone", "sends something else"])
def test_a_rank_that_doesnt_share_its_memory_is_named(end: str) -> None:
    at = bootstraps(2)
    with ThreadPoolExecutor() as pool:
        theirs = pool.submit(connect_locally, at[1])
        ends = connect_locally(at[0])
        (other,) = filter(None, theirs.result())
    (other.close if end == "is gone" else lambda: other.sendall(b"GET /"))()
    with pytest.raises(PeerLost, match="rank 0 lost rank 1 in mapping its shared memory: "):
        share_memory(at[0], ends, 64)
    for one in filter(None, (other, *ends)):
        one.close()
