"""All ranks' parts of a snapshot are merged, and divided anew among the ranks of another world."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.algorithms.notified import make_notified
from paceline.algorithms.sharded import make_sharded
from paceline.codecs.codecs import CODECS
from paceline.comm.communicator import Communicator
from paceline.errors import RankStateError
from paceline.reduce.put_engine.layout import BucketSpec, Topology, lay_out
from paceline.reduce.rank_state import RankState
from paceline.reduce.residuals import EncodedBucket, Residuals
from paceline.snapshots.restore import restore_state
from paceline.state.state_copy import copy_state
from paceline.update.state_watch import plain_state
from tests.contract.test_lossy_exchange import LENGTHS, maker, sums, true_sum, weight_of
from tests.contract.test_snapshots import Growing
from tests.harness.equivalence.exchange_state import adam, same
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.snapshot_ranks import (
    Case,
    Rank,
    by_puts,
    momentum,
    plain_step,
    unscaled,
)

STEP = 4  # the snapshot is of the state before it
WORLDS = [(1,), (3,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1)]
Parts = Sequence[Mapping[str, Any]]


class Layers(nn.Module):
    """Layers of two dtypes; one is frozen later, one is used later, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.frozen = nn.Linear(216, 20)
        self.never = nn.Linear(3, 3)
        self.later = nn.Linear(20, 20)
        self.last = nn.Linear(20, 10).double()
        self.calls = 0

    def to(self, *_: Any) -> Layers:  # type: ignore[override]
        """Keep the dtypes."""
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.frozen(self.convolution(x).flatten(1).relu())
        y = self.later(y).relu() if self.calls > 2 else y
        scores: Tensor = self.last(y.double())
        return scores


def freeze(model: Any, optimizer: Optimizer, number: int, rank: int) -> None:
    """Freeze a layer of which the optimizer has state."""
    model.frozen.requires_grad_(number < 2)


@dataclass(frozen=True)
class State:
    """Kinds of state that ranks own alone."""

    kind: Any = make_sharded
    wire: str = "fp32"
    make_optimizer: Any = adam
    make_step: Any = plain_step
    bucket_bytes: int = 2_000

    def on(self, machines: tuple[int, ...]) -> Case:
        """Return a training that has this state, on so many ranks of each machine."""
        return Case(
            make_model=Layers,
            make_optimizer=self.make_optimizer,
            make_step=self.make_step,
            sync=by_puts(machines, self.wire, self.kind),
            ranks=sum(machines),
            counters=[("model", "calls")],
            change=freeze,
            dtype=torch.float32,
            bucket_bytes=self.bucket_bytes,
        )

    def lossy(self, machines: tuple[int, ...]) -> bool:
        """Return whether ranks have residuals."""
        return self.wire != "fp32" and len(machines) > 1


STATES = {
    "shards with AdamW": State(),
    "shards with momentum": State(make_optimizer=momentum),
    "shards and residuals": State(wire="int8"),
    "residuals of int8": State(kind=make_notified, wire="int8"),
    "residuals of bf16": State(kind=make_notified, wire="bf16"),
    "residuals of a scaled loss": State(kind=make_notified, wire="int8", make_step=Growing),
}
ALL_CHANGES = ("shards with AdamW", "shards and residuals", "residuals of int8")


@dataclass(frozen=True)
class Snapshot:
    """The state of all ranks before a step: copied by each, and gathered."""

    ranks: Sequence[Any]
    gathered: Any

    @property
    def parts(self) -> Parts:
        return [state["rank"] for state in self.ranks]


@cache
def snapshot(name: str, machines: tuple[int, ...], step: int = STEP) -> Snapshot:
    """Train up to a step, and take a snapshot in it."""

    def work(rank: Rank) -> tuple[Any, Any]:
        for number in range(step):
            rank.train(number)
        gathered = unscaled(copy_state(rank.replica.state()))
        taken = rank.take(step)
        rank.train(step)
        return rank.snapshots.state(taken), gathered

    ranks = STATES[name].on(machines).on_ranks(work)
    return Snapshot([state for state, _ in ranks], ranks[0][1])


def state_of(rank: Rank) -> RankState:
    state = rank.replica._binding.state
    assert state is not None
    return state


def divided(case: Case, old: Snapshot, parts: Parts) -> list[tuple[Any, bool, Any]]:
    """Divide parts anew; return what each rank merged, whether all was restored, and the whole."""

    def work(rank: Rank) -> tuple[Any, bool, Any]:
        rank.let_go()
        restore_state(old.ranks[0], rank.objects)
        rank.bind()
        present = set(plain_state(rank.optimizer))
        merged = copy_state(state_of(rank).combine(parts))
        assert set(plain_state(rank.optimizer)) == present, "others' shards stay in memory"
        whole = state_of(rank).restore(merged)
        return unscaled(merged), whole, unscaled(copy_state(rank.replica.state()))

    return case.on_ranks(work)


def total(state: Any) -> dict[str, Tensor]:
    """Sum the residuals of all groups, in their order."""
    zeros = {name: torch.zeros_like(value) for name, value in state["missed"][0].items()}
    return {n: sum((group[n] for group in state["missed"]), zero) for n, zero in zeros.items()}


def owned(name: str, machines: tuple[int, ...]) -> bool:
    """Return whether ranks own some of their state alone."""
    return STATES[name].kind is make_sharded or STATES[name].lossy(machines)


def worlds() -> Iterator[Any]:
    """Yield states and worlds whose ranks own some of it alone."""
    for name, machines in product(STATES, WORLDS):
        if owned(name, machines):
            yield pytest.param(name, machines, id=f"{name}-{machines}")


def changes() -> Iterator[Any]:
    """Yield states, worlds, and next worlds whose ranks own some of the state alone."""
    for name, machines, new in product(STATES, WORLDS, WORLDS):
        if owned(name, new) and (name in ALL_CHANGES or machines == (2, 1)):
            yield pytest.param(name, machines, new, id=f"{name}-{machines}-{new}")


@pytest.mark.parametrize(("name", "machines"), [*worlds()])
def test_merged_parts_are_what_a_checkpoint_of_the_same_moment_gathers(
    name: str, machines: tuple[int, ...]
) -> None:
    old = snapshot(name, machines)
    for merged, whole, _ in divided(STATES[name].on(machines), old, old.parts[::-1]):
        assert same(merged, old.gathered)
        assert whole


@pytest.mark.parametrize(("name", "machines", "new"), [*changes()])
def test_other_ranks_divide_the_state_anew_and_have_all_of_it(
    name: str, machines: tuple[int, ...], new: tuple[int, ...]
) -> None:
    state, old = STATES[name], snapshot(name, machines)
    other_buckets = replace(state, bucket_bytes=10**9)
    results = divided(other_buckets.on(new), old, old.parts)
    _, whole, gathered = results[0]
    assert whole is (state.lossy(new) or not state.lossy(machines))
    if state.kind is make_sharded:
        assert same(gathered["optimizer"], old.gathered["optimizer"])
    if not state.lossy(new):
        assert "missed" not in gathered
    elif not state.lossy(machines):
        assert not any(value.any() for value in total(gathered).values())
    else:
        assert same(total(gathered), total(old.gathered))
        assert all(value.any() for n, value in total(gathered).items() if "never" not in n)
        if len(new) == len(machines):
            assert same(gathered["missed"], old.gathered["missed"])


@pytest.mark.parametrize("machines", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("make_optimizer", [adam, momentum])
def test_merged_shards_are_the_state_of_a_replicas_optimizer(
    machines: tuple[int, ...], make_optimizer: Any
) -> None:
    def work(rank: Rank) -> Any:
        for number in range(STEP):
            rank.train(number)
        rank.replica.settle()
        return copy_state(rank.optimizer.state_dict())

    expected = State(make_notified, make_optimizer=make_optimizer).on(machines).on_ranks(work)[0]
    name = "shards with AdamW" if make_optimizer is adam else "shards with momentum"
    old = snapshot(name, machines)
    merged = divided(STATES[name].on(machines), old, old.parts)[0][0]["optimizer"]
    assert same(merged["param_groups"], expected["param_groups"])
    used, plain = (
        {number: entries for number, entries in state["state"].items() if entries}
        for state in (merged, expected)
    )
    assert used.keys() == plain.keys()
    assert len(used) == 8  # all but those of `never`
    for number, entries in used.items():
        assert entries.keys() == plain[number].keys()
        for key, value in entries.items():
            assert value.dtype is plain[number][key].dtype
            assert value.stride() == plain[number][key].stride()
            assert torch.allclose(value, plain[number][key], rtol=1e-5, atol=1e-8)


REFUSED = {
    "no part that has any": (
        lambda parts, later, other: [
            {**part, **{key: {} for key in ("optimizer", "missed") if key in part}}
            for part in parts
        ],
        "no part has them|no rank's part",
    ),
    "a part is missing": (lambda parts, later, other: parts[1:], "no part has them"),
    "a part of another snapshot": (
        lambda parts, later, other: [*parts[1:], later[0]],
        "different snapshots",
    ),
    "a part of another world": (
        lambda parts, later, other: [*parts[1:], other[0]],
        "no part has them|differ",
    ),
    "a part is there in two forms": (
        lambda parts, later, other: [*parts, altered(parts[1])],
        "the parts differ",
    ),
}


def altered(part: Any) -> Any:
    """Change the last value of a part."""
    part = copy_state(part)
    key = "optimizer" if "optimizer" in part else "missed"
    *_, (_, _, values) = (entry for entry in part[key].values() if len(entry[2]))
    (values if isinstance(values, Tensor) else [*values.values()][-1])[-1] += 1
    return part


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize("name", STATES)
def test_parts_that_are_not_one_snapshot_of_all_are_refused(name: str, reason: str) -> None:
    machines = (2, 2)
    old = snapshot(name, machines)
    change, sentence = REFUSED[reason]
    others = snapshot(name, machines, STEP + 1), snapshot(name, (1, 1))
    parts = change(old.parts, *(other.parts for other in others))

    def work(rank: Rank) -> None:
        for number in range(STEP):
            rank.train(number)
        before = copy_state(rank.replica.state())
        with pytest.raises(RankStateError, match=sentence):
            state_of(rank).combine(parts)
        assert same(copy_state(rank.replica.state()), before)
        rank.train(STEP)

    STATES[name].on((1, 1)).on_ranks(work)


@pytest.mark.parametrize("name", STATES)
def test_parts_may_be_there_twice_and_ranks_without_any_left_out(name: str) -> None:
    old = snapshot(name, (2, 1))
    parts = [old.parts[2], old.parts[0], copy_state(old.parts[0])]
    merged, *_ = divided(STATES[name].on((1, 1)), old, parts)[0]
    assert same(merged, old.gathered)


@pytest.mark.parametrize(
    ("machines", "new"),
    [
        ((2, 1), (1, 2)),
        ((2, 1), (2, 2)),
        ((1, 1), (2, 3)),
        ((1, 1, 1), (1, 1)),
        ((2, 2), (1, 1, 1)),
        ((1, 2, 1), (2, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_what_was_missed_is_sent_once_by_the_ranks_of_another_world(
    codec: str, machines: tuple[int, ...], new: tuple[int, ...]
) -> None:
    """All sums so far, and what is still missed, are the sum of all gradients so far."""

    def train(machines: tuple[int, ...], steps: range, parts: Parts) -> tuple[Tensor, Parts]:
        make, topology = maker(machines, codec), Topology.of(machines)
        spec = BucketSpec(lengths=LENGTHS, dtype=torch.float32, codec=CODECS[codec])
        layout = lay_out([spec], topology).buckets[0]

        def work(c: Communicator) -> tuple[Tensor, Any]:
            exchange = make(c.rank)
            bucket = EncodedBucket(
                layout=layout,
                templates=[torch.zeros(n) for n in LENGTHS],
                names=[str(n) for n in LENGTHS],
                feedback=exchange.feedbacks[0],
            )
            residuals = Residuals([bucket], topology, c.rank)
            assert residuals.restore(residuals.combine(parts))
            got = [sums(exchange, c.rank, n, weight_of(c.rank)).double() for n in steps]
            exchange.begin(1.0)
            part = copy_state(residuals.local())
            exchange.drain()
            exchange.close()
            return torch.stack(got).sum(0), part

        results = run_ranks(sum(machines), work)
        return results[0][0], [part for _, part in results]

    first, parts = train(machines, range(3), [])
    second, parts = train(new, range(3, 5), parts)
    missed = torch.zeros_like(first)
    ends = dict(zip(map(str, LENGTHS), torch.split(missed, list(LENGTHS)), strict=True))
    for part in parts:
        for name, (start, stop, values) in part["missed"].items():
            ends[name][start:stop] += values
    true = [true_sum(sum(machines), n) for n in range(3)]
    true += [true_sum(sum(new), n) for n in range(3, 5)]
    largest = torch.stack(true).abs().max()
    assert missed.abs().max() > 1e-4 * largest
    assert (first + second + missed - torch.stack(true).sum(0)).abs().max() < 1e-6 * largest
