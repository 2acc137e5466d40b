"""However the ranks divide the global batches, they train as one process does, to 1e-10."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.sharded import make_sharded
from tests.harness.equivalence.equivalence_cases import CASES
from tests.harness.equivalence.large_batch import State, Training, largest_difference
from tests.harness.equivalence.put_synchronizers import notified

KINDS: dict[str, Callable[[], Callable[..., Any]]] = {
    "allreduce": lambda: make_allreduce,
    "notified": lambda: notified(False),
    "sharded": lambda: notified(False, kind=make_sharded),
}
CUTS = 14  # of a training; with 3 kinds and 5 worlds 210
TOGETHER = (  # what needs all ranks of a step at once
    *("accumulated", "clipped by norm", "set by hand", "unused parameters"),
    *("sync_bn", "sync_bn of all kinds", "sync_bn, clipped"),
)


def drawn_cuts(steps: int, ranks: int, seed: str) -> list[Sequence[int]]:
    """Draw proportions for each step: of any sizes, and 0 for one rank in three."""
    drawn = random.Random(seed)
    found: list[Sequence[int]] = []
    while len(found) < steps:
        shares = [
            drawn.choice((0, drawn.randrange(1, 9), drawn.randrange(1, 99))) for _ in range(ranks)
        ]
        if any(shares):
            found.append([int(share) for share in shares])
    return found


def training_of(case: str) -> Training:
    training = CASES[case]()
    if case != "usual":
        return training
    return Training.of(training.model, training.make_optimizer, steps=CUTS)


@cache
def alone(case: str) -> State:
    return training_of(case).alone()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_any_cut_trains_as_one_process_does(kind: str, ranks: int) -> None:
    require_equal("usual", kind, drawn_cuts(CUTS, ranks, f"{kind} {ranks}"), ranks)


@pytest.mark.parametrize(
    ("kind", "case"),
    [*(("allreduce", case) for case in CASES), *(("notified", case) for case in TOGETHER)],
)
def test_every_case_is_exact_with_any_cut(kind: str, case: str) -> None:
    steps = len(training_of(case).batches)
    require_equal(case, kind, drawn_cuts(steps, 3, f"{kind} {case}"), 3)


def require_equal(case: str, kind: str, cuts: Sequence[Sequence[int]], ranks: int) -> None:
    states = replace(training_of(case), cuts=cuts).on_threads(ranks, 2_000, KINDS[kind]())
    for state in states:
        assert largest_difference(state, alone(case)) < 1e-10
        assert largest_difference(state, states[0]) == 0
