"""Event loops of aborted groups rest: each connection that is shut down is reported once more."""

from __future__ import annotations

import ctypes
import select
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.comm.gloo_loops import _EVENT, report_once
from paceline.comm.process_group import UnfinishedGroups

_ADD, _POINTER = 1, 12345  # EPOLL_CTL_ADD; what a loop's owner has in the event's data


class Collective:
    """Collective that ends never."""

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


def test_a_connection_is_reported_once_more_with_the_owners_data(loop: select.epoll) -> None:
    report_once([loop.fileno()])
    ((data, events),) = loop.poll(0)
    assert data == _POINTER
    assert events & select.EPOLLIN
    assert loop.poll(0) == []


def test_the_loops_of_a_group_that_is_kept_rest(loop: select.epoll) -> None:
    works: list[Any] = [Collective()]
    UnfinishedGroups().add("a group", works, [loop.fileno()])
    assert len(loop.poll(0)) == 1
    assert loop.poll(0) == []


def test_what_is_closed_meanwhile_is_passed_over(loop: select.epoll) -> None:
    number = loop.fileno()
    loop.close()
    report_once([number])
