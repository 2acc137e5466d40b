"""A step's account: what it took, where its time went, and what settling between steps waited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.observe.event_file import EventFile, read_events
from paceline.recorder import NullRecorder
from paceline.timeline.step_account import StepAccount

PLACE = {
    "generation": 0,
    "step": 3,
    "epoch": 0,
    "first": 0,
    "last": 8,
    "cuts": [0, 8],
    "skipped": 0,
}


class Clock:
    """Nanoseconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def passes(self, ms: float) -> None:
        self.now += round(ms * 1e6)


class Told(NullRecorder):
    """Keeps the events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, **fields: object) -> None:
        self.events.append((name, fields))


def spend(account: StepAccount, clock: Clock, ms: float, name: str, **fields: object) -> None:
    with account.span(name, **fields):
        clock.passes(ms)


def a_step(account: StepAccount, clock: Clock) -> None:
    """Wait 7 ms and copy 0.3 since the step before, compute 100, wait 2 + 3 + 1, copy 0.2."""
    spend(account, clock, 7, "wait", bucket=2)
    spend(account, clock, 0.3, "snapshot")
    with account.span("step", step=3):
        spend(account, clock, 4, "boundary")
        with account.span("train"):
            clock.passes(60)
            spend(account, clock, 2, "wait", bucket=1)
            spend(account, clock, 5, "update", bucket=1)
            spend(account, clock, 3, "wait", bucket=0)
            spend(account, clock, 1, "wait", bucket=1)
            clock.passes(40)
            spend(account, clock, 0.5, "send", bucket=0)
            spend(account, clock, 0.2, "snapshot")
            account.count("sent", 1000)
            account.count("received", 900)
            account.count("sent", 24)
    account.event("step", **PLACE)


def test_a_step_is_told_with_its_account() -> None:
    told, clock = Told(), Clock()
    a_step(StepAccount(told, clock=clock), clock)
    figures = {
        "compute_ms": 100.0,
        "exposed_ms": 13.0,
        "send_ms": 0.5,
        "update_ms": 5.0,
        "snapshot_ms": 0.5,
        "check_ms": 0.0,
        "waits_ms": {"2": 7.0, "1": 3.0, "0": 3.0},
        "sent": 1024,
        "received": 900,
    }
    assert told.events == [("step", {**PLACE, **figures})]


def test_a_step_is_accounted_for_once_and_the_next_one_anew() -> None:
    told, clock = Told(), Clock()
    account = StepAccount(told, clock=clock)
    a_step(account, clock)
    account.event("step", **PLACE)  # an earlier share of the same step
    account.event("note", text="a note")
    a_step(account, clock)
    assert told.events[1:3] == [("step", PLACE), ("note", {"text": "a note"})]
    assert told.events[3] == told.events[0]


class Named(Told):
    """A recorder that writes down when it is closed."""

    def __init__(self, name: str, closed: list[str], fails: bool = False) -> None:
        super().__init__()
        self.name, self.closed, self.fails = name, closed, fails

    def close(self) -> None:
        self.closed.append(self.name)
        if self.fails:
            raise OSError("disk full")


def test_all_recorders_get_the_events_and_are_closed_though_one_fails() -> None:
    closed: list[str] = []
    one, other, trace = (Named(name, closed, fails=name == "one") for name in ("one", "other", "t"))
    account = StepAccount(one, other, trace=trace)
    account.event("note", text="x")
    assert one.events == other.events == trace.events
    assert len(one.events) == 1
    with pytest.raises(OSError, match="disk full"):
        account.close()
    assert closed == ["one", "other", "t"]


def test_a_wait_of_nothing_is_not_worth_telling() -> None:
    told, clock = Told(), Clock()
    account = StepAccount(told, clock=clock)
    with account.span("train"):
        spend(account, clock, 0.19, "wait", bucket=1)
    account.event("step", **PLACE)
    assert told.events[0][1]["waits_ms"] == {}
    assert told.events[0][1]["exposed_ms"] == 0.19


def test_the_event_file_keeps_the_account_behind_what_the_ledger_reads(tmp_path: Path) -> None:
    clock = Clock()
    events = EventFile(tmp_path, "a-0")
    account = StepAccount(events, clock=clock)
    account.event("buckets", parameters=[("fc.bias", "fc.weight"), ("conv.weight",)])
    a_step(account, clock)
    account.close()
    buckets, step = read_events(events.path)
    assert buckets["parameters"] == [["fc.bias", "fc.weight"], ["conv.weight"]]
    assert list(step)[: len(PLACE) + 1] == ["event", *PLACE]
    assert (step["exposed_ms"], step["waits_ms"]) == (13.0, {"2": 7.0, "1": 3.0, "0": 3.0})
