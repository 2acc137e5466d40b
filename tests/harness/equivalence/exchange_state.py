"""Trains on ranks that are threads, with `notified`, and keeps and takes the state of all."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from paceline.algorithms.notified import make_notified
from paceline.comm.communicator import Communicator
from paceline.state.state_copy import copy_state
from tests.harness.equivalence.large_batch import convnet, made_up_batches, replicate
from tests.harness.equivalence.put_synchronizers import notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step

BATCHES = [(x.float(), y) for x, y in made_up_batches([12] * 6)]
MODEL = convnet().float().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
State = dict[str, Any]


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Rank:
    """A rank that trains."""

    def __init__(
        self,
        c: Communicator,
        kind: Any,
        start: State | None,
        bucket_bytes: int = 2_000,
        make_optimizer: Any = sgd,
    ) -> None:
        self.communicator = c
        self.model = copy.deepcopy(MODEL)
        self.optimizer = make_optimizer(self.model)
        if start is not None:
            self.model.load_state_dict(start["model"])
            self.optimizer.load_state_dict(copy.deepcopy(start["optimizer"]))
        self.replica = replicate(self.model, self.optimizer, c, bucket_bytes, kind)
        if start is not None and start["exchange"]:
            assert self.replica.restore(start["exchange"])

    def train(self, number: int, scaler: Any = None) -> None:
        with replica_step(self.replica, number, 1 / self.communicator.world_size):
            self.backward(number, scaler)
            if scaler is None:
                self.optimizer.step()
            else:
                scaler.step(self.optimizer)
                scaler.update()
            self.optimizer.zero_grad()

    def backward(self, number: int, scaler: Any = None) -> None:
        x, y = (t[self.communicator.rank :: self.communicator.world_size] for t in BATCHES[number])
        loss = F.cross_entropy(self.model(x), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            self.replica.reduce()

    def state(self) -> State:
        exchange = self.replica.state()
        if self.communicator.rank > 0:
            return {"exchange": exchange}
        rest = dict(exchange or {})
        optimizer = rest.pop("optimizer", None) or self.optimizer.state_dict()
        parts = {"model": self.model.state_dict(), "optimizer": optimizer}
        return copy_state({**parts, "exchange": rest})  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the replica once all ranks are here: the first to end would be lost to the rest."""
        self.communicator.all_reduce(torch.zeros(1)).wait("the end of all ranks")
        self.replica.close()


def train(
    machines: Sequence[int],
    wire: str,
    steps: range,
    start: State | None = None,
    *,
    bucket_bytes: int = 2_000,
    kind: Any = make_notified,
    make_optimizer: Any = sgd,
    intra_machine: Any = None,
) -> State:
    """Train on ranks that are threads; return the state as rank 0 would keep it."""
    make = notified(False, machines, wire, kind, intra_machine=intra_machine)

    def work(c: Communicator) -> State:
        rank = Rank(c, make, start, bucket_bytes, make_optimizer)
        for number in steps:
            rank.train(number)
        state = rank.state()
        rank.close()
        return state

    first, *others = run_ranks(sum(machines), work)
    assert all(other["exchange"] is None for other in others)
    return first


def adam(model: nn.Module) -> Optimizer:
    """Make AdamW with two groups."""
    first, *others = model.parameters()
    groups = [{"params": others, "lr": 1e-2}, {"params": [first], "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=1e-3)


def missed(state: State) -> list[dict[str, Tensor]]:
    return state["exchange"]["missed"]  # type: ignore[no-any-return]


def totals(state: State) -> dict[str, Tensor]:
    """Sum what all groups have missed, by parameter."""
    return {name: sum(group[name] for group in missed(state)) for name in missed(state)[0]}  # type: ignore[misc]


def same(one: Any, other: Any) -> bool:
    """Compare two trees bit for bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def with_ranks(work: Any, wire: str = "int8", kind: Any = make_notified) -> None:
    """Call `work` on each of two ranks that are threads and exchange by `notified`."""
    make = notified(False, (1, 1), wire, kind)

    def run(c: Communicator) -> None:
        rank = Rank(c, make, None)
        work(rank)
        rank.close()

    run_ranks(2, run)
