"""Control lines of several members over real connections."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cluster.membership.control_line import line_thread
from tests.harness.network.control_lines import (
    BEAT,
    HERE,
    LIMIT,
    Recorder,
    connect,
    connected_lines,
    line_of,
)
from tests.harness.processes.run_folders import wait_until

Lines = tuple[list[Any], list[Recorder]]
LARGE = bytes(range(256)) * 40_000  # 10 MB


@pytest.fixture
def two() -> Iterator[Lines]:
    with connected_lines(2) as made:
        yield made


def descriptors() -> int:
    """Count the descriptors; those that earlier tests have left may be closed at any moment."""
    return len(os.listdir("/proc/self/fd"))


def test_all_members_connect_and_frames_arrive_in_order() -> None:
    with connected_lines(4) as (lines, recorders):
        for line in lines:
            for number in range(50):
                line.broadcast("vote", {"number": number, "é": [None, 1.5]})
        for recorder in recorders:
            recorder.wait(lambda r: len(r.frames) == 150)
        for recorder, line in zip(recorders, lines, strict=True):
            for peer in line.connected():
                numbers = [body["number"] for p, _, body, _ in recorder.frames if p == peer]
                assert numbers == list(range(50))
            assert {event[0] for event in recorder.events} == {"opened"}


def test_a_frame_to_a_peer_that_is_not_connected_is_refused(two: Lines) -> None:
    (a, _), _ = two
    assert not a.send("z", "vote", {})
    assert a.silence("z") == float("inf")
    assert a.wait_connected(["b", "z"], 0.01) == {"z"}


def test_bulk_bytes_arrive_unchanged_and_a_vote_passes_them(two: Lines) -> None:
    (a, _), (_, at_b) = two
    assert a.send("b", "part", {"rank": 3}, memoryview(LARGE).cast("B", (100, 102_400)))
    assert a.send("b", "vote", {})
    at_b.wait(lambda r: len(r.frames) == 2)
    assert [kind for _, kind, _, _ in at_b.frames] == ["vote", "part"]
    assert at_b.frames[1][3] == LARGE


def test_bulk_bytes_beyond_the_limit_are_refused() -> None:
    with connected_lines(2, max_bulk=1000) as ((a, _), (_, at_b)):
        assert not a.send("b", "part", {}, bytes(1001))
        assert a.send("b", "part", {}, bytes(1000))
        at_b.wait(lambda r: len(r.frames) == 1)


def test_beats_arrive_at_each_interval(two: Lines) -> None:
    (a, b), _ = two
    for _ in range(3):
        last = a.last_beat("b")
        wait_until(lambda last=last: a.last_beat("b") > last, LIMIT)  # type: ignore[misc]
        wait_until(lambda: b.silence("a") < 2 * BEAT, LIMIT)


def test_a_forked_child_holds_no_descriptors_and_leaves_the_lines_as_they_are() -> None:
    before = descriptors()
    with connected_lines(2) as (lines, recorders):
        assert descriptors() > before
        child = os.fork()
        if child == 0:
            try:
                holds_none = descriptors() <= before and not lines[0].send("b", "vote", {})
                os._exit(0 if holds_none else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        lines[0].send("b", "vote", {})
        recorders[1].wait(lambda r: len(r.frames) == 1)
        assert recorders[1].events == [("opened", "a")]


def test_the_end_of_a_member_is_reported_once_with_its_reason(two: Lines) -> None:
    (a, b), (at_a, at_b) = two
    b.close()
    at_a.wait(lambda r: len(r.events) == 2)
    assert at_a.events[1] == ("closed", "b", "it closed the connection")
    assert at_b.events == [("opened", "a")]
    assert not a.connected()


def test_frames_sent_before_a_close_arrive(two: Lines) -> None:
    (a, _), (_, at_b) = two
    for number in range(100):
        a.send("b", "vote", {"number": number})
    a.send("b", "part", {}, LARGE)
    a.close()
    at_b.wait(lambda r: len(r.events) == 2)
    assert len(at_b.frames) == 101


def test_a_member_whose_connection_breaks_connects_anew(two: Lines) -> None:
    (a, _), (at_a, at_b) = two
    a.post(lambda: a._links["b"].connection.shutdown(socket.SHUT_RDWR))
    for recorder in (at_a, at_b):
        recorder.wait(lambda r: [event[0] for event in r.events] == ["opened", "closed", "opened"])
    assert not a.wait_connected(["b"], LIMIT)
    assert a.send("b", "vote", {})
    at_b.wait(lambda r: len(r.frames) == 1)


def test_the_end_of_a_connection_for_beats_ends_the_pair(two: Lines) -> None:
    (a, _), (at_a, at_b) = two
    a.post(lambda: a._beats._sockets[a._links["b"].row].shutdown(socket.SHUT_RDWR))
    for recorder in (at_a, at_b):
        recorder.wait(lambda r: [event[0] for event in r.events] == ["opened", "closed", "opened"])


def test_a_forgotten_member_is_closed_and_not_accepted_again(two: Lines) -> None:
    (a, b), (at_a, at_b) = two
    b.forget("a")
    at_a.wait(lambda r: len(r.events) == 2)
    assert not b.connected()
    assert at_b.events == [("opened", "a")]
    assert a.wait_connected(["b"], 0.5) == {"b"}  # it has dialed several times
    b.expect("a", HERE, a.port, dial=True)
    assert b.wait_connected(["a"], 0.1) == {"a"}


def test_a_passive_endpoint_is_dialed_whatever_its_name() -> None:
    supervisor, worker = line_of("a/supervisor"), line_of("b")
    try:
        worker.expect("a/supervisor", HERE, supervisor.port)  # leaves it to the smaller name
        assert worker.wait_connected(["a/supervisor"], 0.1)
        worker.expect("a/supervisor", HERE, supervisor.port, dial=True)
        assert not supervisor.wait_connected(["b"], LIMIT)
    finally:
        supervisor.close()
        worker.close()


def test_members_with_different_secrets_do_not_connect() -> None:
    a, b = line_of("a"), line_of("b", secret=b"t" * 32)
    try:
        a.expect("b", HERE, b.port)
        assert a.wait_connected(["b"], 0.3) == {"b"}
        assert not b.connected()
    finally:
        a.close()
        b.close()


def test_calls_are_made_on_the_lines_thread_and_cancelled_ones_are_not(
    two: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a, _), _ = two
    calls: list[tuple[str, str]] = []
    posted, done = threading.Event(), threading.Event()
    clock = SimpleNamespace(now=time.monotonic())
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(line_thread, "time", clock)

    def call(what: str) -> None:
        calls.append((what, threading.current_thread().name))

    a.call_later(0.02, lambda: call("second"))
    a.call_later(0.01, lambda: call("first"))
    a.call_later(0.015, lambda: call("never")).cancel()
    a.call_later(0.03, done.set)
    a.post(lambda: call("now"))
    a.post(posted.set)
    assert posted.wait(LIMIT)
    clock.now += 0.04
    assert done.wait(LIMIT)
    assert calls == [(what, "control line") for what in ("now", "first", "second")]


def test_a_peer_that_sends_no_frames_is_closed(two: Lines) -> None:
    (a, _), (at_a, at_b) = two
    a.post(lambda: a._links["b"].connection.send(b"no frame at all, but long enough"))
    at_b.wait(lambda r: len(r.events) >= 2)
    assert at_b.events[1][:2] == ("closed", "a")
    assert "no frames" in at_b.events[1][2]
    at_a.wait(lambda r: len(r.events) == 3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_a_handler_ends_the_line(two: Lines) -> None:
    (a, b), (at_a, _) = two

    def fail() -> None:
        raise RuntimeError("a bug")

    b.post(fail)
    at_a.wait(lambda r: len(r.events) == 2)
    b.close()
    assert not b.send("a", "vote", {})
    assert a.connected() == frozenset()


def test_thirty_lines_leave_no_descriptors_and_no_threads() -> None:
    for cycle in range(31):
        with connected_lines(2) as (lines, recorders):
            lines[0].send("b", "part", {}, LARGE[:1000])
            recorders[1].wait(lambda r: len(r.frames) == 1)
        if cycle == 0:
            before = descriptors(), threading.active_count()
    assert descriptors() <= before[0]
    assert threading.active_count() <= before[1]


def test_a_member_that_reconnects_thirty_times_leaves_no_descriptors() -> None:
    b = line_of("b")
    try:
        for cycle in range(31):
            a = line_of("a")
            connect([a, b])
            a.close()
            assert wait_until_alone(b)
            if cycle == 0:
                before = descriptors()
        assert descriptors() <= before
    finally:
        b.close()


def wait_until_alone(line: Any) -> bool:
    """Wait until a line has no peers, and the descriptors of the last are closed."""
    alone = threading.Event()

    def look() -> None:
        if line._links or line._beats._sockets:
            line.call_later(0.005, look)
        else:
            alone.set()

    line.post(look)
    return alone.wait(LIMIT)
