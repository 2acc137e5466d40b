"""Rows of puts under way: they take memory with their first use, and there is a maximum of them."""

from __future__ import annotations

import socket
import tracemalloc

import numpy as np
import pytest

from paceline.comm.transport import event_loop as loop
from paceline.comm.transport import transport
from paceline.comm.transport.transport import Transport
from paceline.errors import CommError

SOURCE = np.ones(2**22, np.uint8)  # far more than a socket holds


def resident() -> int:
    """Return the bytes that this process has of its own."""
    with open("/proc/self/smaps_rollup") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith("Anonymous:"))


def put(sender: Transport, value: int) -> None:
    sender.put(1, [(SOURCE.ctypes.data, SOURCE.nbytes)], (0, 0, value), 0, SOURCE)


def ends() -> tuple[Transport, socket.socket]:
    """Return a transport and the other end of its connection, which receives nothing."""
    mine, other = socket.socketpair()
    return Transport([[], [mine]], np.zeros(64, np.uint8), 1), other


def test_a_transport_takes_no_memory_for_puts_that_it_does_not_make() -> None:
    transports = [ends()]  # the first one loads the compiled loop
    before = resident()
    tracemalloc.start()
    transports += [ends() for _ in range(4)]
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert allocated < 4 * 200_000
    assert resident() - before < 4 * 1_000_000
    for sender, other in transports:
        sender.close()
        other.close()


def test_rows_of_sent_puts_are_used_again_and_more_than_there_are_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "_PUTS", 3)
    sender, other = ends()
    try:
        for value in (1, 2, 3):
            put(sender, value)
        with pytest.raises(CommError, match="3 chunks are in flight, which is the maximum"):
            put(sender, 4)
        for value in range(4, 12):
            frames = -(-SOURCE.nbytes // transport.CHUNK)
            left = SOURCE.nbytes + frames * loop.HEAD
            while left:
                left -= len(other.recv(min(left, 2**20)))
            assert sender.sleep(1, lambda: room(sender), 60)
            put(sender, value)
    finally:
        sender.close()
        other.close()


def room(sender: Transport) -> bool:
    """Return whether a put has been sent whose row isn't used yet."""
    sent = sender._puts[:, loop.STATUS]
    return bool((sent == loop.SENT).any() or (sent == loop.FREE).any())
