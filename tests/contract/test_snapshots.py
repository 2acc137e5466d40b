"""A snapshot is the state before a step, whatever the step does, and training continues from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from paceline.algorithms.sharded import make_sharded
from paceline.errors import ConfigError
from paceline.replica.state_copier import restore_state
from paceline.state.snapshots import SnapshotName
from tests.contract.test_own_steps import Lamb
from tests.harness.equivalence.case_models import Tied, Unused, WithTemperature, normalised
from tests.harness.equivalence.case_steps import (
    EveryOther,
    Scaled,
    accumulated,
    adam,
    clipped_by_norm,
    fused,
    with_outside_parameter,
)
from tests.harness.equivalence.large_batch import World, convnet
from tests.harness.equivalence.snapshot_ranks import (
    TOKEN,
    Case,
    Rank,
    by_puts,
    first_difference,
    settled_before,
    undisturbed,
)

pytestmark = pytest.mark.usefixtures("one_core")

STEP = 3  # the snapshot is of the state before it
STEPS = 8

NORMALISED = Case(make_model=normalised)
SYNCS: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "notified": {"sync": by_puts()},
    "notified, two ranks on a machine": {"sync": by_puts((2, 1)), "ranks": 3},
    "sharded": {"sync": by_puts((1, 1), kind=make_sharded)},
    "sharded, three ranks": {"sync": by_puts((2, 1), kind=make_sharded), "ranks": 3},
    "bf16": {"sync": by_puts((1, 1), "bf16"), "dtype": torch.float32},
    "int8": {"sync": by_puts((1, 1), "int8"), "dtype": torch.float32},
    "int8, four ranks": {"sync": by_puts((2, 2), "int8"), "dtype": torch.float32, "ranks": 4},
    "sharded, int8": {
        "sync": by_puts((1, 1), "int8", make_sharded),
        "dtype": torch.float32,
    },
}


class Groups(nn.Module):
    """A frozen layer, an unused one, a parameter that the step reads, and rank-local memory."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(192, 20).requires_grad_(False)
        self.middle = nn.Linear(20, 16)
        self.never = nn.Linear(3, 3)
        self.head = nn.Linear(16, 10)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[0]
        with torch.no_grad():  # a teacher, as scripts have it
            self.frozen.bias.mul_(0.9).add_(0.01)
        y: Tensor = self.head(self.middle(self.frozen(x.flatten(1))).tanh())
        return y


def reading_outside(
    world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
) -> None:
    """Read a parameter while no module runs."""
    F.cross_entropy(model(x) * model.scale, y).backward()
    optimizer.step()
    optimizer.zero_grad()


def shrinking(world: Any, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """Settle within the step, and write the weights before the forward."""
    world.settle()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def freeze_later(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
    """Freeze the first layer, and change a rate, after the snapshot was taken."""
    model[0].requires_grad_(number <= STEP)  # type: ignore[index]
    optimizer.param_groups[1]["weight_decay"] = 0.1 if number <= STEP else 0.2


def add_a_group_later(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
    """Move the first layer's weight to a group of its own after the snapshot was taken."""
    if number == STEP + 1 and len(optimizer.param_groups) == 2:
        moved = optimizer.param_groups[1]["params"].pop()
        optimizer.add_param_group({"params": [moved], "lr": 0.01})


def once(step: Any) -> Callable[[], Any]:
    return lambda: step


CASES = {
    "gradient accumulation": Case(make_model=normalised, make_step=once(accumulated)),
    "reduced gradients": Case(make_model=normalised, make_step=once(clipped_by_norm)),
    "a frozen layer and a parameter that no layer reads": Case(
        make_model=Groups, make_step=once(reading_outside), make_optimizer=adam
    ),
    "a parameter that only the optimizer has": Case(
        make_model=WithTemperature, make_optimizer=with_outside_parameter
    ),
    "tied weights": Case(make_model=Tied),
    "optimizer state that came into being later": Case(
        make_model=Unused, make_optimizer=adam, counters=[("model", "calls")]
    ),
    "a fused optimizer": Case(make_model=normalised, make_optimizer=fused),
    "steps without a forward and without an update": Case(
        make_model=normalised, make_step=EveryOther, counters=[("step", "steps")]
    ),
    "a loss scaler": Case(
        make_model=convnet,
        make_step=lambda: Scaled(unscale=True),
        make_optimizer=adam,
        counters=[("step", "steps")],
    ),
    "weights written in the step": Case(make_model=normalised, make_step=once(shrinking)),
    "a layer frozen later": Case(make_model=convnet, change=freeze_later),
}
REPLICATED_ONLY = {
    "an optimizer with its own step": Case(
        make_model=normalised, make_optimizer=lambda model: Lamb(model.parameters())
    ),
    "sync_bn": Case(make_model=normalised, sync_bn=True),
    "a group added later": Case(make_model=convnet, change=add_a_group_later),
}


def check(case: Case, step: int = STEP) -> None:
    """Take a snapshot of the state before a step, train on, go back, and train to the end."""
    expected, end = settled_before(case, step), undisturbed(case, STEPS)

    def work(rank: Rank) -> None:
        for number in range(step):
            rank.train(number)
        name = rank.take(step)
        for number in range(step, step + 3):
            rank.train(number)
        assert rank.snapshots.held == (name,)
        memory = {n: t.data_ptr() for n, t in rank.tensors().items()}
        rank.interrupt(step + 3)
        for _ in range(2):  # a snapshot may be restored again
            assert rank.go_back(name), "the rank's own state didn't fit"
            assert rank.snapshots.state(name)["position"] == {"step": step, "sums": [0.5 * step]}
            assert {n: t.data_ptr() for n, t in rank.tensors().items()}.items() <= memory.items()
            assert all(p.grad is None for p in rank.model.parameters())
            here = rank.settled()
            assert not first_difference(here, expected[rank.communicator.rank])
            rank.train(step)
            rank.interrupt(step + 1)
        assert rank.go_back(name)
        for number in range(step, STEPS):
            rank.train(number)
        assert not first_difference(rank.settled(), end[rank.communicator.rank])

    case.on_ranks(work)


@pytest.mark.parametrize("sync", SYNCS)
def test_going_back_to_a_snapshot_gives_the_bits_of_a_run_that_was_never_disturbed(
    sync: str,
) -> None:
    check(replace(NORMALISED, make_optimizer=adam, **SYNCS[sync]))


@pytest.mark.parametrize("sync", ["allreduce", "notified", "sharded"])
@pytest.mark.parametrize("case", CASES)
def test_a_snapshot_is_the_state_before_a_step_whatever_steps_do(case: str, sync: str) -> None:
    check(replace(CASES[case], **SYNCS[sync]))


@pytest.mark.parametrize("sync", ["allreduce", "notified"])
@pytest.mark.parametrize("case", REPLICATED_ONLY)
def test_a_snapshot_of_replicas_is_the_state_before_a_step(case: str, sync: str) -> None:
    check(replace(REPLICATED_ONLY[case], **SYNCS[sync]))
