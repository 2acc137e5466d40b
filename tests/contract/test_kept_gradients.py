"""Gradients that a loop doesn't zero are sums over steps, as in plain torch, for uneven shares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from tests.harness.equivalence.large_batch import replicate
from tests.harness.equivalence.put_synchronizers import KINDS
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step

SHARES = ((5, 2), (1, 6), (3, 0), (2, 2), (0, 4), (1, 3))  # of two ranks, by step
FULL = (0, 1, 3, 5)  # steps in which both ranks have samples
Loop = Callable[[nn.Module, torch.optim.Optimizer, Any, "Batches"], None]


class Branches(nn.Module):
    """Two branches, the second of which only samples of odd sign use; a layer of 4096 values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.wide = nn.Linear(6, 64), nn.Linear(64, 64)
        self.rare, self.last = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, rare = self.first(x).tanh(), x[:, 0] > 0.8
        wide = self.wide(hidden)
        if rare.any():
            wide = torch.where(rare[:, None], self.rare(hidden), wide)
        scores: Tensor = self.last(wide)
        return scores


class Batches:
    """This rank's batches; all samples of a step without a rank."""

    def __init__(self, rank: int | None) -> None:
        self._rank = rank

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        counts = SHARES[step]
        random = torch.Generator().manual_seed(step)
        x = torch.randn(sum(counts), 6, dtype=torch.float64, generator=random)
        y = torch.randint(0, 3, (sum(counts),), generator=random)
        if self._rank is None:
            return x, y
        return x.split(counts)[self._rank], y.split(counts)[self._rank]

    def weight(self, step: int) -> float:
        return 1.0 if self._rank is None else SHARES[step][self._rank] / sum(SHARES[step])


class Alone:
    """Steps of one process with all samples."""

    def begin(self, number: int, weight: float, samples: int) -> None:
        pass

    def end(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    if len(batch[0]):
        F.cross_entropy(model(batch[0]), batch[1]).backward()


def never_zeroed(model: nn.Module, optimizer: Any, world: Any, batches: Batches) -> None:
    for number in FULL:
        with replica_step(world, number, batches.weight(number)):
            backward(model, batches[number])
            optimizer.step()


def zeroed_every_other_step(model: nn.Module, optimizer: Any, world: Any, batches: Batches) -> None:
    for number in range(len(SHARES)):
        with replica_step(world, number, batches.weight(number)):
            if number % 2 == 0:
                optimizer.zero_grad()
            backward(model, batches[number])
            optimizer.step()


def stepped_every_other_step(
    model: nn.Module, optimizer: Any, world: Any, batches: Batches
) -> None:
    for number in range(len(SHARES)):
        with replica_step(world, number, batches.weight(number)):
            backward(model, batches[number])
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


def zeroed_after_the_forward(
    model: nn.Module, optimizer: Any, world: Any, batches: Batches
) -> None:
    for number in range(len(SHARES)):
        with replica_step(world, number, batches.weight(number)):
            x, y = batches[number]
            loss = F.cross_entropy(model(x), y) if len(x) else None
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            if loss is not None:
                loss.backward()
            optimizer.step()


def zeroed_in_place_after_the_step(
    model: nn.Module, optimizer: Any, world: Any, batches: Batches
) -> None:
    for number in range(len(SHARES)):
        with replica_step(world, number, batches.weight(number)):
            backward(model, batches[number])
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def one_layer_kept(model: Any, optimizer: Any, world: Any, batches: Batches) -> None:
    for number in FULL:
        with replica_step(world, number, batches.weight(number)):
            backward(model, batches[number])
            optimizer.step()
        for layer in (model.first, model.wide, model.last):
            for p in layer.parameters():
                p.grad = None


def looked_at_on_one_rank(model: nn.Module, optimizer: Any, world: Any, batches: Batches) -> None:
    for number in FULL:
        with replica_step(world, number, batches.weight(number)):
            backward(model, batches[number])
            optimizer.step()
        if batches.weight(0) > 0.5:  # on rank 0
            [p.grad.norm() for p in model.parameters() if p.grad is not None]


def zeroed_by_hand(model: nn.Module, optimizer: Any, world: Any, batches: Batches) -> None:
    for number in FULL:
        with replica_step(world, number, batches.weight(number)):
            backward(model, batches[number])
            optimizer.step()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()


EXACT: Sequence[Loop] = (
    never_zeroed,
    zeroed_every_other_step,
    stepped_every_other_step,
    zeroed_after_the_forward,
    zeroed_in_place_after_the_step,
    one_layer_kept,
    looked_at_on_one_rank,
    zeroed_by_hand,
)


def plain(loop: Loop) -> list[Tensor]:
    model = Branches().double()
    loop(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), Alone(), Batches(None))
    return list(model.parameters())


def on_ranks(loop: Loop, bucket_bytes: int, options: Any) -> list[list[Tensor]]:
    initial = Branches().double()

    def train(communicator: Communicator) -> list[Tensor]:
        model = copy.deepcopy(initial)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica = replicate(model, optimizer, communicator, bucket_bytes, **options)
        loop(model, optimizer, replica, Batches(communicator.rank))
        replica.settle()
        replica.drain()
        replica.close()
        return list(model.parameters())

    return run_ranks(2, train)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bucket_bytes", [1, 10**9])
@pytest.mark.parametrize("loop", EXACT, ids=lambda loop: loop.__name__)
def test_kept_gradients_are_those_of_plain_torch(loop: Loop, bucket_bytes: int, kind: str) -> None:
    if kind == "sharded" and loop in (looked_at_on_one_rank, zeroed_by_hand):
        pytest.skip("no rank has the means, so a look after the step is refused")
    expected = plain(loop)
    for found in on_ranks(loop, bucket_bytes, KINDS[kind]()):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def never_zeroed_in_one_share(
    model: nn.Module, optimizer: Any, world: Any, batches: Batches
) -> None:
    for _ in range(4):
        with replica_step(world, 0, batches.weight(0)):
            backward(model, batches[0])
            optimizer.step()


def never_zeroed_but_clipped(
    model: nn.Module, optimizer: Any, world: Any, batches: Batches
) -> None:
    for number in (0, 1, 3, 5):  # each rank has samples
        with replica_step(world, number, batches.weight(number)):
            backward(model, batches[number])
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


@pytest.mark.parametrize(
    "loop", [never_zeroed_in_one_share, never_zeroed_but_clipped], ids=lambda loop: loop.__name__
)
@pytest.mark.parametrize("kind", KINDS)
def test_kept_gradients_of_one_weight_or_reduced_are_exact(loop: Loop, kind: str) -> None:
    expected = plain(loop)
    for found in on_ranks(loop, 10**9, KINDS[kind]()):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def accumulated_before_the_step(
    model: nn.Module, optimizer: Any, world: Any, batches: Batches
) -> None:
    """Two backward passes a step, of which the first comes before it."""
    for number in FULL:
        with world.no_sync():
            backward(model, batches[0])
        with replica_step(world, number, batches.weight(number)):
            backward(model, batches[0])
            optimizer.step()


def without_samples(model: nn.Module, optimizer: Any, world: Any, batches: Batches) -> None:
    for number in range(3):
        with replica_step(world, number, batches.weight(number)):
            backward(model, batches[number])
            optimizer.step()


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (accumulated_before_the_step, "when this rank had another share of the samples"),
        (without_samples, "and this rank has no samples now"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_kept_gradients_that_cant_be_exact_are_refused(loop: Loop, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"^the gradient of .* in step \d includes") as caught:
        on_ranks(loop, 10**9, KINDS["allreduce"]())
    assert reason in str(caught.value)
