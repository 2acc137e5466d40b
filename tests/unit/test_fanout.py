"""A fan-out tells all its recorders, and closes all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.observe.fanout import Fanout
from paceline.recorder import Recorder


class RunEvents:
    """A recorder that writes down what it is told."""

    def __init__(self, name: str, events: list[str], fails: bool = False) -> None:
        self.name, self.events, self.fails = name, events, fails

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self.events.append(f"{self.name} enters {name}")
        yield
        self.events.append(f"{self.name} leaves {name}")

    def count(self, name: str, amount: float) -> None:
        self.events.append(f"{self.name} counts {amount} {name}")

    def event(self, name: str, **fields: object) -> None:
        self.events.append(f"{self.name} hears {name} {fields}")

    def close(self) -> None:
        self.events.append(f"{self.name} closes")
        if self.fails:
            raise OSError("disk full")


def test_all_are_told_everything_in_order() -> None:
    events: list[str] = []
    both: Recorder = Fanout(RunEvents("a", events), RunEvents("b", events))
    with both.span("step"):
        both.count("bytes", 3)
    both.event("note", text="x")
    assert events == [
        "a enters step",
        "b enters step",
        "a counts 3 bytes",
        "b counts 3 bytes",
        "b leaves step",
        "a leaves step",
        "a hears note {'text': 'x'}",
        "b hears note {'text': 'x'}",
    ]


def test_all_are_closed_though_one_fails() -> None:
    events: list[str] = []
    both = Fanout(RunEvents("a", events, fails=True), RunEvents("b", events))
    with pytest.raises(OSError, match="disk full"):
        both.close()
    assert events == ["a closes", "b closes"]
