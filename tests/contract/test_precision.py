"""Lower precision in forward and backward: weights stay float, ranks stay equal."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.comm.communicator import Communicator
from paceline.run.precision import Precision
from tests.harness.equivalence.large_batch import largest_difference, replicate, sgd
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step

State = dict[str, torch.Tensor]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-1, 1, 8 * 6).reshape(8, 6), torch.arange(8) % 3


def train(
    model: nn.Module,
    communicator: Communicator,
    dtype: str,
    overflow_on: int | None = None,
    **clips: float,
) -> State:
    """Train three steps; in the second, the loss of one rank may be too large for float16."""
    own = copy.deepcopy(model)
    optimizer = sgd(own)
    replica = replicate(own, optimizer, communicator, 100)
    precision = Precision(dtype, torch.device("cpu"), **clips)
    x, y = data()
    local = slice(communicator.rank, None, communicator.world_size)
    for step in range(3):
        with replica_step(replica, step, 1 / communicator.world_size):
            with precision.forward():
                loss = F.cross_entropy(own(x[local]), y[local])
            if step == 1 and communicator.rank == overflow_on:
                loss = loss * 1e35
            updated = precision.backward_and_update(loss, replica, optimizer)
        assert updated == (step != 1 or overflow_on is None)  # told on all ranks alike
    assert all(p.dtype is torch.float32 for p in own.parameters())
    return {name: value.clone() for name, value in own.state_dict().items()}


@pytest.mark.parametrize("dtype", ["float", "bfloat16", "float16"])
def test_two_ranks_train_as_one_does_within_the_precision(model: nn.Module, dtype: str) -> None:
    (alone,) = run_ranks(1, lambda c: train(model, c, "float"))
    one, other = run_ranks(2, lambda c: train(model, c, dtype))
    assert largest_difference(one, other) == 0
    assert (
        largest_difference(one, alone) < {"float": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    )


def test_an_overflow_on_one_rank_skips_the_step_on_all(model: nn.Module) -> None:
    one, other = run_ranks(2, lambda c: train(model, c, "float16", overflow_on=1))
    assert largest_difference(one, other) == 0
    assert all(value.isfinite().all() for value in one.values())
    without = run_ranks(2, lambda c: train(model, c, "float16"))[0]
    assert largest_difference(one, without) > 1e-3  # one of the three steps is missing


CLIPS = {"norm": {"clip_norm": 0.1}, "value": {"clip_value": 0.01}}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_clipping_is_of_the_whole_batchs_gradient(model: nn.Module, dtype: str, clip: str) -> None:
    alone = copy.deepcopy(model)
    optimizer = sgd(alone)
    x, y = data()
    for _ in range(3):
        F.cross_entropy(alone(x), y).backward()
        if clip == "norm":
            nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        else:
            nn.utils.clip_grad_value_(alone.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    one, other = run_ranks(2, lambda c: train(model, c, dtype, **CLIPS[clip]))
    assert largest_difference(one, other) == 0
    assert largest_difference(one, alone.state_dict()) < {"float": 1e-6, "float16": 2e-3}[dtype]
    unclipped = run_ranks(2, lambda c: train(model, c, dtype))[0]
    assert largest_difference(one, unclipped) > 1e-2


@pytest.mark.parametrize("dtype", ["float", "bfloat16"])
def test_there_is_no_state_without_loss_scaling(dtype: str) -> None:
    precision = Precision(dtype, torch.device("cpu"))
    assert precision.state_dict() == {}
    precision.load_state_dict({})


def test_the_loss_scale_goes_on_from_its_state(model: nn.Module) -> None:
    precision, other = (Precision("float16", torch.device("cpu")) for _ in range(2))
    optimizer = sgd(model)
    (communicator,) = run_ranks(1, lambda c: c)
    replica = replicate(model, optimizer, communicator, 100)
    x, y = data()
    for number in range(2):
        with replica_step(replica, number, 1.0), precision.forward():
            loss = F.cross_entropy(model(x), y) * (1e35 if number else 1)
            precision.backward_and_update(loss, replica, optimizer)
    state = copy.deepcopy(precision.state_dict())
    assert state["scale"] == 2.0**15  # half of torch's first one
    other.load_state_dict(state)
    assert other.state_dict() == state
