"""A step's account: what it took, where its time went, and what settling between steps waited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.event_file import EventFile, read_events
from paceline.recorder import NullRecorder, Recorders
from tests.harness.timelines import GivenTime

PLACE = {
    "generation": 0,
    "step": 3,
    "epoch": 0,
    "first": 0,
    "last": 8,
    "cuts": [0, 8],
    "skipped": 0,
}


class Told(NullRecorder):
    """Keeps the events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, **fields: object) -> None:
        self.events.append((name, fields))


def a_step(timeline: GivenTime, step: int = 3) -> None:
    """Wait 7 ms and copy 0.3 since the step before, compute 100, wait 2 + 3 + 1, copy 0.2."""
    timeline.spend(0.007, "wait", bucket=2)
    timeline.spend(0.0003, "snapshot")
    with timeline.span("step", step=step):
        with timeline.span("boundary"):
            timeline.passes(0.001)
            timeline.spend(0.003, "wait for summary")
            timeline.spend(0.0004, "check")
        with timeline.span("train"):
            timeline.passes(0.06)
            timeline.spend(0.002, "wait", bucket=1)
            timeline.spend(0.005, "update", bucket=1)
            timeline.spend(0.003, "wait", bucket=0)
            timeline.spend(0.001, "wait", bucket=1)
            timeline.passes(0.04)
            timeline.spend(0.0005, "send", bucket=0)
            timeline.spend(0.0002, "snapshot")
            timeline.count("sent", 1000)
            timeline.count("received", 900)
            timeline.count("sent", 24)


def test_a_step_has_its_account() -> None:
    timeline = GivenTime()
    a_step(timeline)
    assert timeline.account(3) == {
        "compute_ms": 100.0,
        "exposed_ms": 13.0,
        "send_ms": 0.5,
        "update_ms": 5.0,
        "snapshot_ms": 0.5,
        "check_ms": 0.4,
        "boundary_ms": 4.0,
        "waits_ms": {"2": 7.0, "1": 3.0, "0": 3.0},
        "sent": 1024,
        "received": 900,
    }


def test_a_step_is_accounted_for_once_and_the_next_one_anew() -> None:
    timeline = GivenTime()
    a_step(timeline)
    first = timeline.account(3)
    assert timeline.account(3) == {}
    assert timeline.account(4) == {}
    a_step(timeline, 4)
    assert timeline.account(3) == {}
    assert timeline.account(4) == first


def test_the_wait_for_the_samples_of_a_step_is_in_its_account() -> None:
    timeline = GivenTime()
    found = []
    for step, item in enumerate(timeline.each("wait for input", slow(timeline, "ab"))):
        found.append(item)
        a_step(timeline, step)
        assert timeline.account(step)["wait_input_ms"] == 20.0
    assert found == ["a", "b"]
    a_step(timeline, 2)
    assert timeline.account(2)["wait_input_ms"] == 5.0  # until the end was known
    a_step(timeline, 3)
    assert "wait_input_ms" not in timeline.account(3)


def slow(timeline: GivenTime, items: str) -> Iterator[str]:
    """Yield each item after 20 ms, and end 5 ms later."""
    for item in items:
        timeline.passes(0.02)
        yield item
    timeline.passes(0.005)


def test_what_is_computed_is_the_time_without_waits_for_peers() -> None:
    timeline = GivenTime()
    timeline.passes(1.0)
    for name in ("wait for layers", "wait for summary"):
        timeline.spend(0.5, name)
    timeline.spend(0.25, "wait", bucket=0)
    timeline.spend(2.0, "wait for input")
    timeline.spend(4.0, "update", bucket=0)
    assert timeline.own_seconds() == 7.0
    assert timeline.now() == 8.25
    assert (timeline.seconds("update"), timeline.seconds("check")) == (4.0, 0.0)


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
    one, other = (Named(name, closed, fails=name == "one") for name in ("one", "other"))
    recorders = Recorders(one, other)
    recorders.event("note", text="x")
    assert one.events == other.events == [("note", {"text": "x"})]
    with pytest.raises(OSError, match="disk full"):
        recorders.close()
    assert closed == ["one", "other"]


def test_a_wait_of_nothing_is_not_worth_telling() -> None:
    timeline = GivenTime()
    with timeline.span("step", step=0), timeline.span("train"):
        timeline.spend(0.00019, "wait", bucket=1)
    account = timeline.account(0)
    assert account["waits_ms"] == {}
    assert account["exposed_ms"] == 0.19


def test_the_event_file_keeps_the_account_behind_what_the_ledger_reads(tmp_path: Path) -> None:
    timeline = GivenTime()
    recorder = EventFile(tmp_path, "a-0")
    recorder.event("buckets", parameters=[("fc.bias", "fc.weight"), ("conv.weight",)])
    a_step(timeline)
    recorder.event("step", **PLACE, **timeline.account(3))
    recorder.close()
    buckets, step = read_events(recorder.path)
    assert buckets["parameters"] == [["fc.bias", "fc.weight"], ["conv.weight"]]
    assert list(step)[: len(PLACE) + 1] == ["event", *PLACE]
    assert (step["exposed_ms"], step["waits_ms"]) == (13.0, {"2": 7.0, "1": 3.0, "0": 3.0})
    assert step["boundary_ms"] == 4.0
