"""`notified` trains as one process on the whole batch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.notified import make_notified
from paceline.algorithms.sharded import make_sharded
from paceline.reduce.put_engine import gradient_views as gradients
from paceline.reduce.put_engine import shard_reducer as reducer
from tests.harness.equivalence.equivalence_cases import CASES, training
from tests.harness.equivalence.large_batch import convnet, largest_difference
from tests.harness.equivalence.put_synchronizers import (
    in_threads,
    notified,
    notified_by_gloo,
    notified_on_machines,
)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an owner that isn't told go on sleeping, rather than look by itself now and then."""
    monkeypatch.setattr(reducer, "_WAIT_SLICE_S", 1000.0)


@pytest.mark.parametrize("bucket_bytes", [1, 10**9])
@pytest.mark.parametrize("name", CASES)
def test_every_case_on_five_machines(name: str, bucket_bytes: int) -> None:
    """Fewer machines are in the table of `test_equivalence.py`."""
    training = CASES[name]()
    alone = training.alone()
    first, *others = training.on_threads(5, bucket_bytes, notified(False))
    assert largest_difference(first, alone) < 1e-10
    for other in others:
        assert largest_difference(first, other) == 0


@pytest.fixture
def all_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the small gradients of these models where they lie, as large ones are."""
    monkeypatch.setattr(gradients, "_SMALL", 16)


@pytest.mark.usefixtures("all_lent")
@pytest.mark.parametrize("machines", [(2,), (5,), (2, 2), (1, 2), (3, 2), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_case_on_machines_that_add_up_first(name: str, machines: tuple[int, ...]) -> None:
    training = CASES[name]()
    alone = training.alone()
    first, *others = training.on_threads(sum(machines), 2_000, notified(False, machines))
    assert largest_difference(first, alone) < 1e-10
    for other in others:
        assert largest_difference(first, other) == 0


@pytest.mark.usefixtures("all_lent")
@pytest.mark.parametrize("machines", [(), (2, 1)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_case_with_puts_that_come_late_and_in_any_order(
    name: str, machines: tuple[int, ...]
) -> None:
    training = CASES[name]()
    alone = training.alone()
    first, *others = training.on_threads(3, 2_000, notified(True, machines))
    assert largest_difference(first, alone) < 1e-10
    for other in others:
        assert largest_difference(first, other) == 0


@pytest.mark.usefixtures("all_lent")
@pytest.mark.parametrize("name", CASES)
def test_every_case_by_copies_as_of_a_gpus_memory(name: str) -> None:
    training = CASES[name]()
    alone = training.alone()
    first, *others = training.on_threads(3, 2_000, notified(False, (2, 1), staged=True))
    assert largest_difference(first, alone) < 1e-10
    for other in others:
        assert largest_difference(first, other) == 0


@pytest.mark.usefixtures("all_lent")
@pytest.mark.parametrize("machines", [(2, 1), (3, 2), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_case_by_sums_as_of_a_machines_gpus(name: str, machines: tuple[int, ...]) -> None:
    training = CASES[name]()
    alone = training.alone()
    kind = notified(False, machines, intra_machine=in_threads)
    first, *others = training.on_threads(sum(machines), 2_000, kind)
    assert largest_difference(first, alone) < 1e-10
    for other in others:
        assert largest_difference(first, other) == 0


TELLING = (
    *("usual", "unused parameters", "a path that depends on the step", "frozen and unfrozen"),
    *("gradients kept in all ways", "loss scaling, one step skipped"),
)


@pytest.mark.usefixtures("all_lent")
@pytest.mark.parametrize("machines", [(2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("name", TELLING)
def test_telling_cases_over_shared_memory_and_tcp_at_once(
    name: str, machines: tuple[int, ...]
) -> None:
    training = CASES[name]()
    alone = training.alone()
    kind = notified_on_machines(machines)
    first, *others = training.on_threads(sum(machines), 2_000, kind)
    assert largest_difference(first, alone) < 1e-10
    for other in others:
        assert largest_difference(first, other) == 0


@pytest.mark.parametrize("machines", [(2, 1), (1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("name", TELLING)
def test_telling_cases_by_sums_as_of_a_machines_gpus_over_gloo_and_tcp(
    name: str, machines: tuple[int, ...]
) -> None:
    training = CASES[name]()
    alone = training.alone()
    first, *others = training.on_threads(sum(machines), 2_000, notified_by_gloo(machines))
    assert largest_difference(first, alone) < 1e-10
    for other in others:
        assert largest_difference(first, other) == 0


@pytest.mark.parametrize("name", CASES)
def test_every_case_whose_method_and_buckets_change_in_mid_run(name: str) -> None:
    training, puts = CASES[name](), notified(False)
    alone = training.alone()
    later = (None, (puts, 1), None, (puts, 10**9), (make_allreduce, 1), None, (puts, 2_000))
    first, *others = training.on_threads(3, 2_000, make_allreduce, later)
    assert largest_difference(first, alone) < 1e-10
    for other in others:
        assert largest_difference(first, other) == 0


@pytest.mark.parametrize(
    ("machines", "bucket_bytes", "faults"),
    [
        ((1,), 10**9, False),
        ((1, 1), 1, False),
        ((1, 1, 1), 2_000, True),
        ((1,) * 5, 10**9, False),
        ((2,), 2_000, False),
        ((2, 1), 2_000, True),
        ((2, 2), 1, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CASES)
def test_every_case_updated_by_the_owners_of_shards(
    name: str, machines: tuple[int, ...], bucket_bytes: int, faults: bool
) -> None:
    training = CASES[name]()
    alone = training.alone()
    kind = notified(faults, machines, kind=make_sharded)
    first, *others = training.on_threads(sum(machines), bucket_bytes, kind)
    assert largest_difference(first, alone) < 1e-10
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
