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
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.errors import ConfigError
from paceline.snapshots.restore import restore_state
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
from tests.harness.equivalence.contributed import contributed
from tests.harness.equivalence.large_batch import World, convnet, usual_step
from tests.harness.equivalence.served_synchronizers import Served
from tests.harness.equivalence.snapshot_ranks import (
    BATCHES,
    TOKEN,
    Case,
    Rank,
    by_puts,
    first_difference,
    settled_before,
    undisturbed,
)
from tests.harness.equivalence.steps_by_hand import replica_step

STEP = 3  # the snapshot is of the state before it
STEPS = 7

NORMALISED = Case(make_model=normalised)
SYNCS: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "notified": {"sync": by_puts()},
    "notified, two ranks on a machine": {"sync": by_puts((2, 1)), "ranks": 3},
    "sharded": {"sync": by_puts((1, 1), kind=make_sharded)},
    "sharded, three ranks": {"sync": by_puts((2, 1), kind=make_sharded), "ranks": 3},
    "served": {"sync": lambda: Served(2)},
    "served, three workers": {"sync": lambda: Served(1, late=True), "ranks": 3},
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


def halving(world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """Write the weights before the forward; an optimizer's own step leaves nothing pending."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    usual_step(world, model, optimizer, x, y)


class Growing:
    """The loss scale doubles in each step."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)

    def __call__(
        self, world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> None:
        self.scaler.scale(F.cross_entropy(model(x), y)).backward()
        world.reduce()
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()


def evaluate(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
    """Settle before each step, as an evaluation does."""
    model.eval()
    model.train()


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
    "a loss scaler": Case(
        make_model=convnet,
        make_step=lambda: Scaled(unscale=True),
        make_optimizer=adam,
        counters=[("step", "steps")],
    ),
    "weights written in the step": Case(make_model=normalised, make_step=once(shrinking)),
    "weights written before the forward, after an evaluation": Case(
        make_model=normalised, make_step=once(halving), change=evaluate
    ),
    "a layer frozen later": Case(make_model=convnet, change=freeze_later),
}
REPLICATED_ONLY = {
    "an optimizer with its own step": Case(
        make_model=normalised, make_optimizer=lambda model: Lamb(model.parameters())
    ),
    "weights written before the forward, with such an optimizer": Case(
        make_model=normalised,
        make_step=once(halving),
        make_optimizer=lambda model: Lamb(model.parameters()),
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
        rank.interrupt(step + 3)
        for _ in range(2):  # a snapshot may be restored again
            memory = {n: (t, t.data_ptr(), t.shape) for n, t in rank.tensors().items()}
            assert rank.go_back(name), "the rank's own state didn't fit"
            assert rank.snapshots.state(name)["position"] == {"step": step, "sums": [0.5 * step]}
            for n, tensor in rank.tensors().items():
                before, place, shape = memory.get(n, (None, 0, None))
                same = before is tensor and place == tensor.data_ptr()
                assert same or shape != tensor.shape, f"{n} is another tensor"
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


@pytest.mark.parametrize("sync", ["allreduce", "notified", "sharded", "int8", "sharded, int8"])
@pytest.mark.parametrize("step", [4, 5], ids=["without a forward", "without an update"])
def test_a_step_that_computes_nothing_or_updates_nothing_has_a_snapshot(
    sync: str, step: int
) -> None:
    case = replace(NORMALISED, make_step=EveryOther, counters=[("step", "steps")])
    check(replace(case, **SYNCS[sync]), step)


def test_the_synchronizer_of_contributing_has_snapshots() -> None:
    check(Case(make_model=convnet, sync=lambda: contributed()["AtEnd"]))


@pytest.mark.parametrize("sync", ["int8", "sharded, int8"])
def test_residuals_come_back_with_the_scale_of_the_loss(sync: str) -> None:
    check(replace(NORMALISED, make_step=Growing, **SYNCS[sync]))


@pytest.mark.parametrize("sync", ["allreduce", "notified", "sharded, int8"])
def test_each_of_consecutive_steps_has_a_snapshot_and_training_is_as_without(sync: str) -> None:
    case = replace(NORMALISED, make_optimizer=adam, **SYNCS[sync])
    settled = [settled_before(case, step) for step in range(STEPS + 1)]

    def work(rank: Rank) -> None:
        own, sizes, memory = rank.communicator.rank, [], []
        for number in range(STEPS):
            name = rank.take(number)
            rank.train(number)
            state = rank.snapshots.state(name)
            for part in ("parameters", "buffers", "optimizer"):
                assert not first_difference(state[part], settled[number][own][part], part)
            previous = [SnapshotName(TOKEN, number - 1)] if number else []
            assert rank.snapshots.held == (*previous, name)
            rank.snapshots.commit(name)
            assert rank.snapshots.held == (name,)
            sizes.append(rank.snapshots.nbytes)
            memory.append({n: t.data_ptr() for n, t in state["parameters"].items()})
        assert sizes[-1] == sizes[-2] <= 2 * sizes[1]
        assert memory[-1] == memory[-3] != memory[-2]
        assert not first_difference(rank.settled(), settled[STEPS][own])
        rank.let_go()
        assert rank.go_back(name)
        assert not first_difference(rank.settled(), settled[STEPS - 1][own])

    case.on_ranks(work)


@pytest.mark.parametrize("sync", ["allreduce", "notified", "sharded", "int8"])
def test_a_snapshot_settles_nothing_and_waits_only_where_a_layer_does(sync: str) -> None:
    case = replace(NORMALISED, **{**SYNCS[sync], "dtype": torch.float32})

    def work(rank: Rank) -> None:
        for number in range(2):
            rank.train(number)
        layers: Any = rank.model

        def weights() -> list[Tensor]:
            with torch._C.DisableTorchFunctionSubclass():  # as they are, without pending updates
                return [p.detach().clone() for p in layers.parameters()]

        before, looks = weights(), []

        def look(*_: object) -> None:
            assert not torch.equal(before[0], weights()[0])
            if sync != "allreduce":  # whose sums come in the order of backward
                assert torch.equal(before[-1], weights()[-1])
            looks.append(list(rank.snapshots.held))

        x, y = (t[rank.communicator.rank :: 2] for t in BATCHES[2])
        name = rank.take(2)
        with replica_step(rank.replica, 2, 0.5):
            assert all(map(torch.equal, before, weights()))
            layers[0].register_forward_hook(look)
            rank.step(rank.replica, rank.model, rank.optimizer, x.float(), y)
            assert rank.snapshots.held == (name,)
        assert looks == [[]]

    case.on_ranks(work)


def test_a_snapshot_in_the_first_step_leaves_the_tracing_of_reads_alone() -> None:
    case = replace(CASES["a frozen layer and a parameter that no layer reads"])
    check(case, step=0)

    def readers(take: bool) -> Any:
        def work(rank: Rank) -> Any:
            if take:
                rank.take(0)
            rank.train(0)
            names = {p: name for name, p in rank.model.named_parameters()}
            reads = rank.replica._binding.reads
            assert reads is not None
            return [sorted(names[p] for p in own) for own in reads.readers.values()], len(
                reads.outside
            )

        return case.on_ranks(work)

    assert readers(take=True) == readers(take=False)


def test_a_step_that_fails_leaves_no_snapshot_and_the_one_before_stays() -> None:
    def work(rank: Rank) -> None:
        rank.train(0)
        first = rank.take(1)
        rank.train(1)
        rank.snapshots.commit(first)
        rank.take(2)
        rank.interrupt(2)
        assert rank.snapshots.held == (first,)
        assert rank.go_back(first)
        rank.train(1)
        again = rank.take(2)
        rank.train(2)
        assert rank.snapshots.held == (first, again)

    NORMALISED.on_ranks(work)


@pytest.mark.parametrize("sync", ["sharded", "int8, four ranks"])
def test_what_is_divided_among_ranks_comes_back_only_to_the_same_shards(sync: str) -> None:
    case = replace(NORMALISED, **SYNCS[sync])

    def work(rank: Rank) -> None:
        rank.train(0)
        name = rank.take(1)
        rank.train(1)
        rank.let_go()
        rank.case = replace(case, bucket_bytes=10**6)
        assert not rank.go_back(name)
        rank.let_go()
        rank.case = case
        assert rank.go_back(name)

    case.on_ranks(work)


def test_replicated_state_comes_back_to_other_buckets_and_to_shards() -> None:
    case = replace(NORMALISED, make_optimizer=adam)
    expected = settled_before(case, STEP)

    def work(rank: Rank) -> None:
        for number in range(STEP):
            rank.train(number)
        name = rank.take(STEP)
        rank.train(STEP)
        rank.let_go()
        rank.case, rank.kind = replace(case, bucket_bytes=10**6), sharded
        state = restore_state(rank.snapshots.state(name), rank.objects)
        assert not state
        rank.bind()
        gathered = rank.replica.state()
        if rank.communicator.rank == 0:
            assert gathered is not None
            names = [n for g in expected[0]["groups"] for n in g["params"]]
            for number, entry in gathered["optimizer"]["state"].items():
                assert not first_difference(dict(entry), expected[0]["optimizer"][names[number]])

    sharded = by_puts((1, 1), kind=make_sharded)()
    case.on_ranks(work)


def test_another_model_than_the_snapshots_is_refused() -> None:
    def work(rank: Rank) -> None:
        rank.train(0)
        name = rank.take(1)
        rank.train(1)
        rank.let_go()
        model: Any = rank.model
        model.append(nn.Linear(10, 10))
        with pytest.raises(ConfigError, match=r"8\.(weight|bias) was added, removed or converted"):
            restore_state(rank.snapshots.state(name), rank.objects)
        del model[8]

    NORMALISED.on_ranks(work)


class TwoOutside(WithTemperature):
    """Two parameters of one shape that only the optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.outside.append(nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) * self.outside[1]
        return y


@pytest.mark.parametrize("sync", ["allreduce", "sharded"])
def test_parameters_of_one_shape_that_only_the_optimizer_has_are_told_apart(sync: str) -> None:
    case = Case(make_model=TwoOutside, make_optimizer=with_outside_parameter)
    check(replace(case, **SYNCS[sync]))


class Extra(nn.Module):
    """Has state that is neither parameter nor buffer, and a buffer that comes and grows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 10)
        self.calls = 0
        self.register_buffer("queue", torch.zeros(1))
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        assert isinstance(self.queue, Tensor)
        self.queue = torch.cat([self.queue, self.queue.new_full((1,), float(self.calls))])
        self.last = self.queue[-1:] if self.calls > STEP + 1 else None
        if self.calls == STEP + 2:
            self.register_buffer("late", torch.ones(1))
        y: Tensor = self.linear(x.flatten(1))
        return y * (1 + self.queue.sum() / 100)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_extra_state_and_buffers_that_come_and_grow_are_as_they_were() -> None:
    check(Case(make_model=Extra))
