"""When puts have left and arrived, as the loop writes it down."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from paceline.comm.connection_window import ConnectionWindow
from paceline.comm.window import PutEvent
from paceline.timeline.timeline import Timeline
from paceline.timeline.traced_window import TracedWindow
from tests.harness.network.window_kinds import LIMIT


@contextmanager
def pair(marks: int, connections: int = 1) -> Iterator[list[Any]]:
    """Two windows of 100 bytes on so many sockets."""
    ends = list(zip(*(socket.socketpair() for _ in range(connections)), strict=True))
    places = [[[], ends[0]], [ends[1], []]]
    memories = [torch.zeros(100, dtype=torch.uint8) for _ in places]
    windows = [
        ConnectionWindow(rank, memories[rank], places[rank], [None, None], 3, marks=marks)
        for rank in range(2)
    ]
    try:
        yield windows
    finally:
        for window in windows:
            window.close()


def exchanged(windows: list[Any], count: int) -> None:
    """Put so many times from rank 0 to rank 1, pieces of 40 and 20 bytes each."""
    pieces = [torch.full((size,), 7, dtype=torch.uint8) for size in (40, 20)]
    for value in range(1, count + 1):
        windows[0].put(1, 0, pieces, 2, value)
        windows[1].wait(0, 2, value, limit=LIMIT, operation="a put")
        windows[0].flush(1, limit=LIMIT, operation="a put")


@pytest.mark.parametrize("connections", [1, 3])
def test_a_put_leaves_once_and_arrives_once_each_on_the_systems_clock(connections: int) -> None:
    with pair(10, connections) as windows:
        begun = time.monotonic_ns()
        exchanged(windows, 2)
        ended = time.monotonic_ns()
        left, arrived = windows[0].moments, windows[1].moments
    assert [moment[:4] for moment in left] == [(False, 1, 2, 1), (False, 1, 2, 2)]
    assert [moment[:4] for moment in arrived] == [(True, 0, 2, 1), (True, 0, 2, 2)]
    assert begun < arrived[0].at < left[1].at < ended
    assert begun < left[0].at < arrived[1].at < ended


def test_the_newest_moments_are_remembered() -> None:
    with pair(marks=3) as windows:
        exchanged(windows, 5)
        found: list[PutEvent] = windows[1].moments
    assert [moment.value for moment in found] == [3, 4, 5]
    assert [moment.at for moment in found] == sorted({moment.at for moment in found})


def test_nothing_is_written_down_where_nobody_asks() -> None:
    with pair(marks=0) as windows:
        exchanged(windows, 2)
        assert [window.moments for window in windows] == [[], []]


class Spans(Timeline):
    """Keeps the spans."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, object]]] = []

    def span(self, name: str, **fields: object) -> Any:
        self.seen.append((name, fields))
        return super().span(name, **fields)


def test_a_traced_window_measures_puts_and_waits() -> None:
    spans = Spans(), Spans()
    with pair(marks=0) as windows:
        traced = [TracedWindow(window, 4, spans[rank]) for rank, window in enumerate(windows)]
        exchanged(traced, 1)
        assert traced[1].memory.tolist() == [7] * 60 + [0] * 40
        assert traced[1].wait_for_event(0, LIMIT) == 1
    told = {"window": 4, "peer": 1, "notification": 2, "value": 1}
    assert spans[0].seen == [
        ("put", {**told, "bytes": 60, "priority": 0}),
        ("flush", {"peer": 1}),
    ]
    assert spans[1].seen == [("wait for rank", {**told, "peer": 0}), ("wait for notification", {})]
