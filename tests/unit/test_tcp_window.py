"""How TCP connections are set up for puts."""

from __future__ import annotations

import socket
import sys
from math import inf
from pathlib import Path

import pytest

from paceline.comm.transport.tcp import in_flight, round_trip, tune

KB = 2**10


@pytest.mark.parametrize(
    ("microseconds", "connections", "few"),
    [
        (50, 1, 256 * KB),  # a cable
        (400, 1, 256 * KB),  # some switches
        (500, 1, None),  # 10 Gbit/s need more
        (400, 2, 128 * KB),
        (500, 2, None),
        (1400, 7, 128 * KB),
        (50_000, 7, None),  # another continent
    ],
)
def test_little_is_in_flight_where_a_round_trip_needs_no_more(
    microseconds: int, connections: int, few: int | None
) -> None:
    assert in_flight(microseconds / 1e6, connections) == few


def test_a_kernel_that_tells_no_round_trip_is_left_alone() -> None:
    told = (250).to_bytes(4, sys.byteorder)
    assert round_trip(bytes(148) + told) == 250e-6
    for untold in (b"", told * 36, bytes(152)):
        assert round_trip(untold) == inf
    assert in_flight(inf, 7) is None


@pytest.mark.parametrize("connections", [1, 3])
def test_connections_to_a_near_machine_are_kept_short(connections: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname()) for _ in range(connections)]
        near = in_flight(0.0, connections)
        assert near is not None
        granted = 2 * min(near, int(Path("/proc/sys/net/core/wmem_max").read_text()))
        before = [end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for end in ends]
        tune([[], ends])
        for end, had in zip(ends, before, strict=True):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == granted != had
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            end.close()
