"""A watched optimizer state calls before each use, and is the plain one after the last watch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD

from paceline.update.state_watch import plain_state, unwatch_state, watch_state


def optimizer_of_one() -> tuple[SGD, nn.Parameter]:
    p = nn.Parameter(torch.ones(2))
    return SGD([p], lr=0.1, momentum=0.9), p


def calls_of(calls: list[str], name: str) -> Callable[[], None]:
    return lambda: calls.append(name)


def test_each_use_calls_all_who_watch_and_each_once() -> None:
    optimizer, p = optimizer_of_one()
    calls: list[str] = []
    one, other = calls_of(calls, "one"), calls_of(calls, "other")
    for callback in (one, other, one):
        watch_state(optimizer, callback)
    assert p not in optimizer.state
    assert calls == ["one", "other"]
    plain_state(optimizer)[p] = {}
    assert len(calls) == 2


def test_a_watch_that_ends_leaves_the_others() -> None:
    optimizer, p = optimizer_of_one()
    plain, calls = optimizer.state, list[str]()
    one, other = calls_of(calls, "one"), calls_of(calls, "other")
    watch_state(optimizer, one)
    watch_state(optimizer, other)
    unwatch_state(optimizer, one)
    unwatch_state(optimizer, one)  # it doesn't watch any more
    optimizer.state[p] = {"momentum_buffer": None}
    assert calls == ["other"]
    unwatch_state(optimizer, other)
    assert optimizer.state is plain
    assert plain == {p: {"momentum_buffer": None}}
    assert calls == ["other"]
