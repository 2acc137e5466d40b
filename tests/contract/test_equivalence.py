"""Several ranks train as one process on the whole batch does, to 1e-10 in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.comm.communicator import Communicator
from paceline.sync.allreduce import AllReduce
from paceline.sync.replica import Replica
from tests.harness.equivalence import Training, convnet, largest_difference, replicate, sgd
from tests.harness.threads import run_ranks

Kind = Callable[..., Any]


def contributed() -> Kind:
    """Read the synchronizer that CONTRIBUTING.md shows as an example."""
    text = Path(__file__, "../../../CONTRIBUTING.md").resolve().read_text()
    chapter = text[text.index("## How to add a synchronizer") :]
    names: dict[str, Any] = {}
    exec(chapter[chapter.index("```python") + 10 : chapter.index("```\n\nThen")], names)
    kind: Kind = names["AtEnd"]
    return kind


SYNCHRONIZERS: dict[str, Kind] = {"allreduce": AllReduce, "CONTRIBUTING's": contributed()}
BUCKET_BYTES = {"a parameter each": 1, "about 2 kB": 2_000, "whole model": 10**9}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return convnet()


@pytest.fixture(params=SYNCHRONIZERS.values(), ids=SYNCHRONIZERS.keys())
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


def trained(
    training: Training, world_size: int, bucket_bytes: int, kind: Kind
) -> list[dict[str, torch.Tensor]]:
    return run_ranks(world_size, lambda c: training.on_rank(c, bucket_bytes, kind))


@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES.values(), ids=BUCKET_BYTES.keys())
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_ranks_train_as_one_process_does(
    model: nn.Module, world_size: int, bucket_bytes: int, kind: Kind
) -> None:
    training = Training.of(model)
    states = trained(training, world_size, bucket_bytes, kind)
    for state in states:
        assert largest_difference(state, training.alone()) < 1e-10
        assert largest_difference(state, states[0]) == 0


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
        lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),  # not element-wise
    ],
    ids=["AdamW", "Adagrad", "Adafactor"],
)
def test_any_optimizer_trains_as_alone(model: nn.Module, make_optimizer: Any, kind: Kind) -> None:
    training = Training.of(model, make_optimizer)
    for state in trained(training, 3, 2_000, kind):
        assert largest_difference(state, training.alone()) < 1e-10


def test_channels_last_weights_train_as_contiguous_ones_do(model: nn.Module, kind: Kind) -> None:
    training = Training.of(model)
    last = training.with_model(copy.deepcopy(model).to(memory_format=torch.channels_last))
    for state in trained(last, 2, 2_000, kind):
        assert largest_difference(state, training.alone()) < 1e-10


def test_a_rank_without_samples_learns_what_the_others_learn(model: nn.Module, kind: Kind) -> None:
    training = Training.of(model)  # the last batch has 5 samples
    states = trained(training, 7, 2_000, kind)
    assert largest_difference(states[6], training.alone()) < 1e-10


class Attention(nn.Module):
    """Reads `out_proj` without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.attention(tokens, tokens, tokens)[0].mean(1))


class Tied(nn.Module):
    """Reads one weight twice, by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(192, 10, bias=False)
        self.again = nn.Linear(192, 10, bias=False)
        self.again.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        return self.inner(flat) + self.again(flat.tanh())


class Unused(nn.Module):
    """Has a layer that nobody uses, and one that only later steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(192, 10)
        self.never = nn.Linear(3, 3)
        self.later = nn.Linear(10, 10)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.used(x.flatten(1))
        return y + self.later(y) if self.calls > 3 else y


@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES.values(), ids=BUCKET_BYTES.keys())
@pytest.mark.parametrize("make_model", [Attention, Tied, Unused])
def test_unusual_models_train_as_alone(
    make_model: type[nn.Module], bucket_bytes: int, kind: Kind
) -> None:
    torch.manual_seed(2)
    training = Training.of(make_model().double())
    for state in trained(training, 3, bucket_bytes, kind):
        assert largest_difference(state, training.alone()) < 1e-10


def test_running_statistics_are_the_mean_of_the_ranks_and_settling_twice_changes_nothing() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=0.5), nn.Linear(4, 2)).double()
    x = torch.randn(2, 6, 4, dtype=torch.float64)

    def train(communicator: Communicator) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(model)
        optimizer = sgd(own)
        replica = replicate(own, optimizer, communicator, 10**6)
        with replica.step(0, 0.5):
            own(x[communicator.rank]).sum().backward()
            optimizer.step()
        own.eval()
        own.eval()
        return own.state_dict()

    expected = 0.5 * x.mean(dim=1).mean(dim=0)  # momentum 0.5 from 0
    for state in run_ranks(2, train):
        torch.testing.assert_close(state["0.running_mean"], expected, rtol=0, atol=1e-12)


def test_a_second_backward_is_an_error_that_names_the_remedy(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        own = copy.deepcopy(model)
        optimizer = sgd(own)
        replica: Replica = replicate(own, optimizer, communicator, 2_000)
        x, y = Training.of(own).batches[0]
        with replica.step(0, 1.0):
            F.cross_entropy(own(x), y).backward()
            F.cross_entropy(own(x), y).backward()

    with pytest.raises(ValueError, match=r"completed twice in step 0: .*no_sync"):
        run_ranks(1, train)


def test_accumulated_backwards_equal_one_on_the_whole_batch(model: nn.Module) -> None:
    training = Training.of(model, steps=2)

    def train(communicator: Communicator) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(model)
        optimizer = sgd(own)
        replica = replicate(own, optimizer, communicator, 2_000)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, training.gamma)
        for number, (x, y) in enumerate(training.batches):
            with replica.step(number, 1 / 2):
                half = len(x) // 2
                with replica.no_sync():
                    (F.cross_entropy(own(x[:half]), y[:half]) * half / len(x)).backward()
                (F.cross_entropy(own(x[half:]), y[half:]) * (len(x) - half) / len(x)).backward()
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
        return own.state_dict()

    for state in run_ranks(2, train):  # both ranks do the whole batch, each with half the weight
        assert largest_difference(state, training.alone()) < 1e-10


def test_a_scheduler_made_before_or_after_sees_the_optimizers_steps(model: nn.Module) -> None:
    def train(communicator: Communicator) -> list[float]:
        own = copy.deepcopy(model)
        optimizer = sgd(own)
        before = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        replica = replicate(own, optimizer, communicator, 2_000)
        after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        x, y = Training.of(own).batches[0]
        with replica.step(0, 1.0):
            F.cross_entropy(own(x), y).backward()
            optimizer.step()
        before.step()  # a warning, and so an error, if it had missed the step
        after.step()
        return after.get_last_lr()

    assert run_ranks(1, train)[0] == pytest.approx([0.1 * 0.5 * 0.1] * 2)
