"""Silence on the control line: a held interpreter lock is none, a stopped process is."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.cluster.membership.control_line.line import ControlLine
from tests.harness.network.control_lines import HERE, LIMIT, Recorder, line_of

BEAT = 0.4
HELD_S = 30.0  # as the protocol requires
NOTICED_S = 10.0  # the default peer timeout: a shorter silence, of a busy machine, expels none
STOPPED = 5 * BEAT


class Member(Recorder):
    """Member in a process of its own, which does what frames from the test ask for."""

    line: ControlLine

    def opened(self, peer: str) -> None:
        if peer == "test":
            self.line.send(peer, "port", {"port": self.line.port})
        else:
            self.line.send("test", "connected", {})

    def received(self, peer: str, kind: str, body: dict[str, Any], bulk: bytes | bytearray) -> None:
        if kind == "expect":
            self.line.expect(body["peer"], HERE, body["port"])
        elif kind == "hold":  # calls through PyDLL keep the interpreter's lock
            ctypes.PyDLL(None).usleep(int(HELD_S * 1e6))
            self.line.send(peer, "released", {"seconds": self.line.silence(peer)})
        elif kind == "silence":
            self.line.send(peer, "silence", {"seconds": self.line.silence(body["peer"])})


def run_member(name: str, port: int) -> None:
    member = Member()
    member.line = line_of(name, member, beat_seconds=BEAT)
    member.line.expect("test", HERE, port)
    threading.Event().wait()


@pytest.fixture
def line() -> Iterator[tuple[ControlLine, Recorder, list[int]]]:
    """A line that is connected with members a and b in two processes."""
    recorder = Recorder()
    own = line_of("test", recorder, beat_seconds=BEAT)
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=run_member, args=(name, own.port)) for name in "ab"]
    for process in processes:
        process.start()
    try:
        assert not own.wait_connected("ab", 2 * LIMIT)
        yield own, recorder, [process.pid for process in processes if process.pid]
    finally:
        own.close()
        for process in processes:
            process.kill()
            process.join()


def watch(line: ControlLine, peer: str, until: Callable[[float], bool]) -> float:
    """Return a peer's longest silence until a condition of the present one holds; look often."""
    longest, ended = [0.0], threading.Event()

    def look() -> None:
        silence = line.silence(peer)
        longest[0] = max(longest[0], silence)
        if until(silence):
            ended.set()
        else:
            line.call_later(0.01, look)

    line.post(look)
    assert ended.wait(HELD_S + LIMIT)
    return longest[0]


def test_beats_go_on_while_a_thread_holds_the_interpreters_lock(line: Any) -> None:
    own, recorder, _ = line
    begin = time.monotonic()
    own.send("a", "hold", {})
    longest = watch(own, "a", lambda _: any(kind == "released" for _, kind, *_ in recorder.frames))
    assert time.monotonic() - begin >= HELD_S  # no frame came before
    assert longest < NOTICED_S
    (released,) = (body for _, kind, body, _ in recorder.frames if kind == "released")
    assert released["seconds"] < NOTICED_S  # it received beats, too
    assert [event[0] for event in recorder.events] == ["opened", "opened"]


def test_a_stopped_member_is_silent_and_one_that_wakes_does_not_judge_others(line: Any) -> None:
    own, recorder, (a, b) = line
    recorder.wait(lambda r: len(r.frames) == 2)
    port = next(body["port"] for peer, _, body, _ in recorder.frames if peer == "b")
    own.send("a", "expect", {"peer": "b", "port": port})
    recorder.wait(lambda r: len(r.frames) == 4)
    os.kill(a, signal.SIGSTOP)
    os.kill(b, signal.SIGSTOP)
    watch(own, "a", lambda silence: silence > STOPPED)
    assert own.connected() == {"a", "b"}
    assert own.silence("b") > STOPPED / 2
    woken = time.monotonic()
    os.kill(a, signal.SIGCONT)
    own.send("a", "silence", {"peer": "b"})
    recorder.wait(lambda r: len(r.frames) == 5)
    awake = time.monotonic() - woken  # it has heard nothing of b meanwhile
    assert recorder.frames[-1][2]["seconds"] < awake + STOPPED / 2
    watch(own, "a", lambda silence: silence < STOPPED / 2)
    assert own.silence("b") > STOPPED / 2
    os.kill(b, signal.SIGCONT)
