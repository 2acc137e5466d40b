"""Connections of an event loop, found among this process's descriptors while others change them."""

from __future__ import annotations

import os
import select
import socket
from contextlib import ExitStack

import pytest

from paceline.comm.gloo_loops import connections_of, shut_down


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
