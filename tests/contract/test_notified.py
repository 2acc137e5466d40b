"""`notified` trains as one process on the whole batch does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.notified import make_notified
from paceline.algorithms.sharded import make_sharded
from paceline.reduce.put_engine import gradient_views as gradients
from paceline.reduce.put_engine import owner
from tests.harness.equivalence.equivalence_cases import CASES, training
from tests.harness.equivalence.large_batch import Kind, State, convnet, largest_difference
from tests.harness.equivalence.put_synchronizers import (
    in_threads,
    notified,
    notified_by_gloo,
    notified_on_machines,
)


@pytest.fixture(autouse=True)
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the owner sleep until it is woken, rather than look by itself now and then."""
    monkeypatch.setattr(owner, "_WAIT_SLICE_S", 1000.0)


@pytest.fixture
def all_borrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the small gradients of these models where they lie, as large ones are."""
    monkeypatch.setattr(gradients, "_SMALL", 16)


@dataclass(frozen=True)
class Setting:
    """How the contributions travel: ranks of each machine, bucket size, and a synchronizer."""

    machines: tuple[int, ...]
    kind: Callable[[], Kind]
    bucket_bytes: int = 2_000

    def __str__(self) -> str:
        return f"{'+'.join(map(str, self.machines))} ranks, buckets of {self.bucket_bytes:,} bytes"


def by_puts(machines: tuple[int, ...], bucket_bytes: int = 2_000, **options: Any) -> Setting:
    """Return a setting on windows that are threads' own; `late` puts land late, in any order."""
    late, grouped = options.pop("late", False), machines if max(machines) > 1 else ()
    return Setting(machines, lambda: notified(late, grouped, **options), bucket_bytes)


SETTINGS = {
    "one rank a machine": [
        by_puts((1,) * 5, 1),
        by_puts((1,) * 5, 10**9),
    ],
    "machines that sum first": [
        *(by_puts(machines) for machines in ((2,), (5,), (2, 2), (1, 2), (3, 2), (1, 1, 2))),
    ],
    "late puts": [by_puts((1,) * 3, late=True), by_puts((2, 1), late=True)],
    "copies, as of a GPU's memory": [by_puts((2, 1), staged=True)],
    "sums of a machine's GPUs": [
        by_puts(machines, intra_machine=in_threads) for machines in ((2, 1), (3, 2), (1, 2, 1))
    ],
    "sharded": [
        by_puts((1,), 10**9, kind=make_sharded),
        by_puts((1, 1), 1, kind=make_sharded),
        by_puts((1, 1, 1), late=True, kind=make_sharded),
        by_puts((1,) * 5, 10**9, kind=make_sharded),
        by_puts((2,), kind=make_sharded),
        by_puts((2, 1), late=True, kind=make_sharded),
        by_puts((2, 2), 1, kind=make_sharded),
    ],
    "shared memory and TCP": [
        Setting(machines, partial(notified_on_machines, machines)) for machines in ((2, 1), (2, 2))
    ],
    "sums of a machine's GPUs, over Gloo and TCP": [
        Setting(machines, partial(notified_by_gloo, machines))
        for machines in ((2, 1), (1, 3), (2, 2))
    ],
}
TELLING = (
    *("usual", "unused parameters", "a path that depends on the step", "frozen and unfrozen"),
    *("gradients kept in all ways", "loss scaling, one step skipped"),
)
REAL = ("shared memory and TCP", "sums of a machine's GPUs, over Gloo and TCP")


def chosen() -> Iterator[Any]:
    """Yield pairs of a case and a setting.

    Each case meets every sixth setting, and each setting every sixth case; the telling cases meet
    every other setting. Real windows get the telling cases alone.
    """
    settings = [(group, setting) for group, several in SETTINGS.items() for setting in several]
    for number, case in enumerate(CASES):
        for place, (group, setting) in enumerate(settings):
            every = 2 if case in TELLING else 6
            if (number + place) % every == 0 and (case in TELLING or group not in REAL):
                yield pytest.param(case, setting, id=f"{case}-{group}, {setting}")


@cache
def alone(case: str) -> State:
    return CASES[case]().alone()


@pytest.mark.usefixtures("all_borrowed")
@pytest.mark.parametrize(("case", "setting"), [*chosen()])
def test_ranks_train_as_one_process_does(case: str, setting: Setting) -> None:
    """The table of `test_equivalence.py` has up to four machines with a rank each."""
    training, world_size = CASES[case](), sum(setting.machines)
    first, *others = training.on_threads(world_size, setting.bucket_bytes, setting.kind())
    assert largest_difference(first, alone(case)) < 1e-10
    for other in others:
        assert largest_difference(first, other) == 0


@pytest.mark.parametrize("case", CASES)
def test_every_case_whose_method_and_buckets_change_in_mid_run(case: str) -> None:
    training, puts = CASES[case](), notified(False)
    later = (None, (puts, 1), None, (puts, 10**9), (make_allreduce, 1), None, (puts, 2_000))
    first, *others = training.on_threads(3, 2_000, make_allreduce, later)
    assert largest_difference(first, alone(case)) < 1e-10
    for other in others:
        assert largest_difference(first, other) == 0


class Grasping(Optimizer):
    """Writes into gradients, and keeps them for its next step, as people's own optimizers do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for p in group["params"]:
            p.grad.add_(p, alpha=0.1)
            p.sub_(p.grad + 0.5 * self.state[p].get("last", 0), alpha=group["lr"])
            self.state[p]["last"] = p.grad


@pytest.mark.parametrize(
    "make_kind",
    [lambda: make_allreduce, lambda: notified(False), lambda: notified(False, (3,))],
    ids=["collectives", "three machines", "one machine"],
)
def test_an_optimizer_that_writes_and_keeps_gradients_has_some_of_its_own(
    make_kind: Callable[[], Any],
) -> None:
    grasping = training(convnet, make_optimizer=Grasping)
    first, *others = grasping.on_threads(3, 2_000, make_kind())
    assert largest_difference(first, grasping.alone()) < 1e-10
    for other in others:
        assert largest_difference(first, other) == 0


@pytest.mark.parametrize("machines", [(1, 1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", [make_notified, make_sharded])
def test_two_runs_give_the_same_bits_however_late_puts_are(
    kind: Any, machines: tuple[int, ...]
) -> None:
    buckets = [
        CASES["usual"]().on_threads(
            sum(machines), 2_000, notified(late, machines, kind=kind, staged=staged)
        )[0]
        for late, staged in ((False, False), (True, False), (True, kind is make_notified))
    ]
    assert largest_difference(buckets[0], buckets[1]) == 0
    assert largest_difference(buckets[0], buckets[2]) == 0


def test_late_puts_change_no_bit_of_sums_as_of_a_machines_gpus() -> None:
    punctual, late = (
        CASES["usual"]().on_threads(4, 2_000, notified(late, (2, 2), intra_machine=in_threads))[0]
        for late in (False, True)
    )
    assert largest_difference(punctual, late) == 0
