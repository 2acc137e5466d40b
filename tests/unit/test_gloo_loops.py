"""Gloo's event loops: their connections are found, shut down and quiet, whatever others change."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from paceline.comm.gloo_loops import _EVENT, connections_of, report_once, shut_down
from paceline.comm.process_group import UnfinishedGroups

_ADD, _POINTER = 1, 12345  # EPOLL_CTL_ADD; what a loop's owner has in the event's data


class Collective:
    """Collective that never ends."""

    def is_completed(self) -> bool:
        return False


@pytest.fixture
def loop() -> Iterator[select.epoll]:
    """Wait for a connection with unread data that is shut down: it is reported again and again."""
    ours, peers = socket.socketpair()
    with ours, peers, select.epoll() as loop:
        event = struct.pack(_EVENT, select.EPOLLIN, _POINTER)
        assert ctypes.CDLL(None).epoll_ctl(loop.fileno(), _ADD, ours.fileno(), event) == 0
        peers.sendall(b"data")
        ours.shutdown(socket.SHUT_RDWR)
        assert loop.poll(0)
        assert loop.poll(0)
        yield loop


def ended(connection: socket.socket) -> bool:
    """Return whether a peer's side has been shut down."""
    connection.settimeout(0.0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_the_connections_of_a_loop_are_shut_down_and_nothing_else_of_it() -> None:
    with ExitStack() as stack:
        loop = stack.enter_context(select.epoll())
        pairs = [socket.socketpair() for _ in range(3)]
        for connection in (each for pair in pairs for each in pair):
            stack.enter_context(connection)
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        read, write = os.pipe()
        stack.callback(os.close, read)
        stack.callback(os.close, write)
        watched = [pairs[0][0].fileno(), pairs[1][0].fileno()]
        for number in (*watched, port.fileno(), read):
            loop.register(number, select.EPOLLIN)
        assert sorted(number for number, _ in connections_of(loop.fileno())) == sorted(watched)
        shut_down([loop.fileno()])
        assert [ended(peer) for _, peer in pairs] == [True, True, False]
        socket.create_connection(port.getsockname()).close()


def test_a_descriptor_that_is_another_file_by_now_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gloo closes a connection when the peer does; another thread gets its number at once."""
    plain = os.dup
    with ExitStack() as stack:
        loop = stack.enter_context(select.epoll())
        (closed, peer), (other, others_peer) = socket.socketpair(), socket.socketpair()
        for each in (closed, peer, other, others_peer):
            stack.enter_context(each)
        loop.register(closed.fileno(), select.EPOLLIN)

        def dup(number: int) -> int:
            if number == closed.fileno():
                os.dup2(other.fileno(), number)
            return plain(number)

        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup", dup)
            shut_down([loop.fileno()])
        assert len(os.listdir("/proc/self/fd")) == before
        assert not ended(others_peer)


def test_a_connection_is_reported_once_more_with_the_owners_data(loop: select.epoll) -> None:
    report_once([loop.fileno()])
    ((data, events),) = loop.poll(0)
    assert data == _POINTER
    assert events & select.EPOLLIN
    assert loop.poll(0) == []


def test_a_port_and_the_pipe_that_wakes_a_loop_stay_as_they_are() -> None:
    read, write = os.pipe()
    with select.epoll() as loop, socket.create_server(("127.0.0.1", 0)) as port:
        loop.register(port.fileno(), 0)
        loop.register(read, select.EPOLLIN)
        report_once([loop.fileno()])
        with socket.create_connection(port.getsockname()):
            os.write(write, b"1")
            for _ in range(2):
                assert [number for number, _ in loop.poll(0)] == [read]
    os.close(read)
    os.close(write)


def test_the_loops_of_a_group_that_is_kept_rest(loop: select.epoll) -> None:
    works: list[Any] = [Collective()]
    UnfinishedGroups().add("a group", works, [loop.fileno()])
    assert len(loop.poll(0)) == 1
    assert loop.poll(0) == []


def test_an_event_loop_that_is_closed_meanwhile_is_passed_over(loop: select.epoll) -> None:
    number = loop.fileno()
    loop.close()
    report_once([number])
