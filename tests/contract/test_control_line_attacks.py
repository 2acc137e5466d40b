"""Unauthenticated connections to a control line: few are open, and members are not disturbed."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from paceline.cluster.membership.control_line import greeters
from paceline.cluster.membership.control_line.line import ControlLine
from paceline.comm.handshake import FRAMES, DialerGreeting, Identity
from tests.harness.network.control_lines import (
    HERE,
    LIMIT,
    SECRET,
    Recorder,
    connected_lines,
    line_of,
)

X = Identity(name="x", secret=SECRET)
Lines = tuple[list[Any], list[Recorder]]


@pytest.fixture
def two() -> Iterator[Lines]:
    with connected_lines(2) as made:
        yield made


def dial(line: ControlLine) -> socket.socket:
    return socket.create_connection((HERE, line.port), LIMIT)


def is_closed(connection: socket.socket) -> bool:
    """Wait until the other side has closed a connection; what it sent before is read."""
    connection.settimeout(LIMIT)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def exchange_votes(made: Lines) -> None:
    """Exchange a frame in each direction; the connections are the first ones."""
    (a, b), recorders = made
    counts = [len(recorder.frames) for recorder in recorders]
    assert a.send("b", "vote", {})
    assert b.send("a", "vote", {})
    for recorder, count in zip(recorders, counts, strict=True):
        recorder.wait(lambda r, count=count: len(r.frames) == count + 1)
        assert [event[0] for event in recorder.events] == ["opened"]


def unauthenticated(line: ControlLine) -> int:
    """Return a line's number of unauthenticated connections, once it has accepted all before."""
    counts: list[int] = []
    done = threading.Event()
    line.post(lambda: (counts.append(len(line._listener)), done.set()))
    assert done.wait(LIMIT)
    return counts[0]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01",
        bytes(1),
        DialerGreeting(X, "a member of another run", FRAMES).hello,
    ],
)
def test_wrong_bytes_close_a_connection_at_once(two: Lines, data: bytes) -> None:
    with dial(two[0][1]) as connection:
        connection.sendall(data)
        assert is_closed(connection)
    exchange_votes(two)


def test_a_dialer_with_another_secret_is_closed(two: Lines) -> None:
    with dial(two[0][1]) as connection:
        connection.sendall(DialerGreeting(Identity(name="a", secret=b"t" * 32), "b", FRAMES).hello)
        assert len(connection.recv(64, socket.MSG_WAITALL)) == 64
        connection.sendall(bytes(32))
        assert is_closed(connection)
    exchange_votes(two)


def test_a_recorded_greeting_is_worthless(two: Lines) -> None:
    with dial(two[0][1]) as first:
        greeting = DialerGreeting(X, "b", FRAMES)
        first.sendall(greeting.hello)
        proof = greeting.feed(first.recv(64, socket.MSG_WAITALL))
        first.sendall(proof)
        assert first.recv(1) == b"\x01"
        with dial(two[0][1]) as again:
            again.sendall(greeting.hello)
            assert len(again.recv(64, socket.MSG_WAITALL)) == 64
            again.sendall(proof)
            assert is_closed(again)
    exchange_votes(two)


def test_silent_and_slow_connections_are_closed_at_their_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(greeters, "GREETING_S", 0.5)
    with connected_lines(2) as made, dial(made[0][1]) as silent, dial(made[0][1]) as slow:
        hello = DialerGreeting(X, "b", FRAMES).hello
        stopped = threading.Event()

        def send_slowly() -> None:
            for byte in hello:
                try:
                    slow.send(bytes([byte]))
                except OSError:
                    return
                if stopped.wait(0.05):
                    return

        thread = threading.Thread(target=send_slowly)
        thread.start()
        assert is_closed(silent)
        assert is_closed(slow)
        stopped.set()
        thread.join()
        assert unauthenticated(made[0][1]) == 0
        exchange_votes(made)


def test_a_flood_of_connections_takes_few_descriptors_and_harms_no_member(two: Lines) -> None:
    (_, b), _ = two
    before = len(os.listdir("/proc/self/fd"))
    most, own = 0, 0
    with ExitStack() as stack:
        late = stack.enter_context(dial(b))  # the oldest of its address is closed first
        for number in range(1500):
            connection = dial(b)
            if number % 2:
                connection.send(b"pace")
            if number < 200:
                own += 1
                stack.enter_context(connection)
            else:
                connection.close()
            if number % 100 == 0:
                exchange_votes(two)
                most = max(most, len(os.listdir("/proc/self/fd")) - own - before)
        assert is_closed(late)
        assert unauthenticated(b) <= 64
        assert most <= 64 + 2
        c = line_of("c")
        stack.callback(c.close)
        c.expect("b", HERE, b.port, dial=True)
        assert not b.wait_connected(["c"], LIMIT)
        assert b.send("c", "vote", {})


def test_a_process_without_free_descriptors_keeps_its_members(two: Lines) -> None:
    (_, b), _ = two
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        waiting = [socket.socket() for _ in range(20)]
        for connection in waiting:
            stack.callback(connection.close)
        used = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while True:  # until no descriptor is free
            try:
                stack.callback(os.close, os.dup(0))
            except OSError:
                break
        for connection in waiting:
            connection.connect((HERE, b.port))
        assert unauthenticated(b) == 0
        exchange_votes(two)
