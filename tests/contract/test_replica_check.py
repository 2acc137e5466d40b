"""The replica check: one flipped bit on one rank, or a step on some ranks only, ends the run."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.notified import make_notified
from paceline.algorithms.sharded import make_sharded
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError, ReplicasDiffer
from paceline.snapshots import replica_check
from paceline.snapshots.schedule import SavePolicy
from paceline.update.state_watch import plain_state
from tests.contract.test_steps import Rank, until_stopped
from tests.harness.equivalence.large_batch import convnet
from tests.harness.equivalence.put_synchronizers import notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import run_step

Flip = Callable[[Rank], None]
FLIPPED_BEFORE, STEPS = 5, 200


def method(name: str, ranks: int) -> Any:
    """Return what makes a method's synchronizers for ranks on machines of their own."""
    if name == "allreduce":
        return make_allreduce
    make = make_sharded if name == "sharded" else make_notified
    return notified(False, (1,) * ranks, "int8" if name == "int8" else "fp32", make)


class Counted(nn.Module):
    """A model with a buffer that nothing averages, and running statistics."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = convnet()
        self.register_buffer("steps", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        y: Tensor = self.inner(x)
        return y


def flip(tensor: Tensor, value: int = 0, bit: int = 40) -> None:
    """Flip a bit as memory would: no version counter or hook notices."""
    numbers = tensor.data.flatten()[value : value + 1]
    words = numbers.view(torch.int64 if tensor.element_size() == 8 else torch.int32)
    words ^= 1 << (bit if tensor.element_size() == 8 else bit // 2)


def last_parameter(rank: Rank) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return list(rank.bench.model.parameters())[-1].data


def flip_parameter(rank: Rank) -> None:
    flip(last_parameter(rank))


def flip_buffer(rank: Rank) -> None:
    flip(rank.bench.model.steps, 2)


def flip_optimizer_state(rank: Rank) -> None:
    parameter = list(rank.bench.model.parameters())[1]
    flip(plain_state(rank.bench.optimizer)[parameter]["momentum_buffer"])


def test_local_buffers_are_not_compared(tmp_path: Path) -> None:
    def run(c: Communicator) -> None:
        train_with(c, tmp_path, {FLIPPED_BEFORE: flip_buffer}, {1}, 40, local_buffers=True)

    run_ranks(2, run)


FLIPS: dict[str, tuple[Flip, str]] = {
    "parameter": (flip_parameter, "inner.6.bias"),
    "buffer": (flip_buffer, "steps"),
    "optimizer": (flip_optimizer_state, "the optimizer's momentum_buffer of inner.0.bias"),
}


def train_with(
    c: Communicator,
    folder: Path,
    before: dict[int, Flip],
    ranks: set[int],
    steps: int = STEPS,
    **options: Any,
) -> Rank:
    """Train, and hurt the state of some ranks before some steps."""
    rank = Rank(c, folder, model=options.pop("model", Counted()), **options)
    for number in range(steps):
        if number in before and c.rank in ranks:
            before[number](rank)
        rank.train(number)
    rank.steps.end_steps()
    return rank


def error_of(world_size: int, work: Callable[[Communicator], Any]) -> str:
    """Return the sentence that all ranks get, and that they all get."""
    sentences: dict[int, str] = {}

    def on_rank(c: Communicator) -> None:
        with pytest.raises((ReplicasDiffer, ConfigError)) as caught:
            work(c)
        sentences[c.rank] = str(caught.value)

    run_ranks(world_size, on_rank)
    assert len(set(sentences.values())) == 1
    assert len(sentences) == world_size
    return sentences[0]


@pytest.mark.parametrize(
    ("world_size", "hurt", "sync", "snapshots"),
    [
        *((2, hurt, sync, True) for hurt in range(2) for sync in ("allreduce", "notified")),
        *((3, hurt, "notified", True) for hurt in range(3)),
        *((2, 1, sync, False) for sync in ("allreduce", "notified")),
        (3, 1, "int8", True),
    ],
)
@pytest.mark.parametrize("what", FLIPS)
def test_one_flipped_bit_on_one_rank_ends_the_run(
    tmp_path: Path, world_size: int, hurt: int, sync: str, what: str, snapshots: bool
) -> None:
    (do, name), kind = FLIPS[what], method(sync, world_size)

    def work(c: Communicator) -> None:
        train_with(c, tmp_path, {FLIPPED_BEFORE: do}, {hurt}, kind=kind, snapshots=snapshots)

    text = error_of(world_size, work)
    parts = (
        r"differ after (\d+) steps: (.*?); in the last comparison, after (\d+) steps?, they were "
    )
    found = re.search(parts, text)
    assert found, text
    assert int(found[3]) <= FLIPPED_BEFORE <= int(found[1])
    ranks = f"rank {hurt} differs from the others" if world_size == 3 else "ranks 0 and 1 differ"
    if what == "optimizer":  # the next update has changed the parameter, too
        assert found[2].startswith(f"{ranks} in inner.0.bias, and in ")
    else:
        assert found[2].startswith(f"{ranks} in {name}")


@pytest.mark.parametrize("what", FLIPS)
def test_one_flipped_bit_is_found_where_each_rank_copies_its_part(
    tmp_path: Path, what: str
) -> None:
    (do, name), kind = FLIPS[what], method("notified", 3)

    def work(c: Communicator) -> None:
        rank = Rank(c, tmp_path, model=Counted(), kind=kind, snapshots=True)
        snapshots = rank.steps._snapshots
        snapshots.divides = snapshots._survives = True
        assert snapshots.divided
        for number in range(STEPS):
            if number == FLIPPED_BEFORE and c.rank == 1:
                do(rank)
            rank.train(number)
        rank.steps.end_steps()

    text = error_of(3, work)
    changed = "inner.0.bias" if what == "optimizer" else name
    found = re.search(r"differ after (\d+) steps: (.*?);", text)
    assert found, text
    assert int(found[1]) < STEPS  # by what was summed while a part was copied, not in the end
    assert found[2].startswith(f"rank 1 differs from the others in {changed}")


@pytest.mark.parametrize("hurt", [0, 1])
@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_sharded_compares_parameters_and_buffers(tmp_path: Path, what: str, hurt: int) -> None:
    """Those that the next update doesn't replace by what their owner has."""
    do, name = FLIPS[what]
    frozen, kind = Counted(), method("sharded", 2)
    frozen.inner[6].bias.requires_grad_(False)

    def work(c: Communicator) -> None:
        train_with(c, tmp_path, {FLIPPED_BEFORE: do}, {hurt}, kind=kind, model=frozen)

    assert f"ranks 0 and 1 differ in {name}" in error_of(2, work)


def load_model(rank: Rank) -> None:
    state = rank.bench.model.state_dict()
    rank.bench.model.load_state_dict({n: v + 1 for n, v in state.items()})


def load_optimizer(rank: Rank) -> None:
    rank.bench.optimizer.load_state_dict(copy.deepcopy(OPTIMIZER_STATE))


def load_and_back(rank: Rank) -> None:
    own = copy.deepcopy(rank.bench.model.state_dict())
    load_model(rank)
    rank.bench.model.load_state_dict(own)


def optimizer_state() -> dict[str, Any]:
    parameters = [*Counted().parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    state = {index: {"momentum_buffer": torch.ones_like(p)} for index, p in enumerate(parameters)}
    return {**optimizer.state_dict(), "state": state}


OPTIMIZER_STATE = optimizer_state()


@pytest.mark.parametrize("hurt", [0, 1])
@pytest.mark.parametrize(
    ("load", "name"),
    [
        (load_model, "the loaded inner.0.weight, and in 6 more values"),
        (load_optimizer, "the optimizer state that was loaded"),
    ],
)
def test_a_load_on_one_rank_in_mid_run_ends_a_sharded_run(
    tmp_path: Path, load: Flip, name: str, hurt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but what was loaded is compared in that step, however slow the steps are."""
    monkeypatch.setattr(replica_check, "_COST", 1e-9)
    kind = method("sharded", 2)

    def work(c: Communicator) -> None:
        train_with(c, tmp_path, {FLIPPED_BEFORE: load}, {hurt}, kind=kind)

    text = error_of(2, work)
    assert f"ranks 0 and 1 differ in {name}" in text
    assert f"differ after {FLIPPED_BEFORE} steps" in text


@pytest.mark.parametrize("sync", ["allreduce", "sharded"])
@pytest.mark.parametrize("load", [load_model, load_optimizer, load_and_back])
def test_a_load_that_leaves_the_ranks_equal_is_fine(tmp_path: Path, load: Flip, sync: str) -> None:
    ranks, kind = {0} if load is load_and_back else {0, 1}, method(sync, 2)

    def work(c: Communicator) -> None:
        train_with(c, tmp_path, {FLIPPED_BEFORE: load}, ranks, 20, kind=kind)

    run_ranks(2, work)


@pytest.mark.parametrize("sync", ["allreduce", "notified", "sharded", "int8"])
def test_equal_replicas_train_to_the_end(tmp_path: Path, sync: str) -> None:
    kind = method(sync, 3)

    def lower(rank: Rank) -> None:
        rank.bench.optimizer.param_groups[0]["lr"] = 0.05

    def rewrite(rank: Rank) -> None:  # alike on all ranks
        with torch.no_grad():
            next(rank.bench.model.parameters()).mul_(0.5)
        rank.bench.model.cache.fill_(rank.communicator.rank)  # in no state dict

    def work(c: Communicator) -> None:
        before = {7: lower, 9: rewrite}
        rank = train_with(c, tmp_path, before, set(range(3)), steps=70, kind=kind)
        assert rank.steps._check._equal is not None
        assert rank.steps._check._equal > 9

    run_ranks(3, work)


def test_a_learning_rate_of_one_rank_ends_the_run(tmp_path: Path) -> None:
    def lower(rank: Rank) -> None:
        rank.bench.optimizer.param_groups[0]["lr"] = 0.01

    text = error_of(2, lambda c: train_with(c, tmp_path, {6: lower}, {1}))
    assert "ranks 0 and 1 differ in " in text
    assert "of rank" not in text


def test_two_values_that_are_exchanged_end_the_run(tmp_path: Path) -> None:
    """Of a small buffer, and of a large one."""
    torch.manual_seed(1)
    for size in (8, 70_000):
        model = Counted()
        model.register_buffer("order", torch.randperm(size))

        def exchange(rank: Rank) -> None:
            order = rank.bench.model.order
            order.data[[1, 5]] = order.data[[5, 1]]

        def work(c: Communicator, model: nn.Module = model) -> None:
            train_with(c, tmp_path, {6: exchange}, {1}, model=model)

        assert "ranks 0 and 1 differ in order" in error_of(2, work)


def test_objects_of_an_optimizer_are_compared_by_their_tensors(tmp_path: Path) -> None:
    def add_objects(rank: Rank) -> None:
        states = plain_state(rank.bench.optimizer)
        for state in states.values():
            state |= {"own": object(), "names": {"a", "b", f"{rank.communicator.rank}"}}
            state["history"] = [torch.zeros(2000), {"last": torch.zeros(3)}]
        rank.bench.optimizer.param_groups[0]["schedule"] = lambda step: step

    def change_one(rank: Rank) -> None:
        state = plain_state(rank.bench.optimizer)[next(rank.bench.model.parameters())]
        state["history"][0][1000] += 5

    def work(c: Communicator) -> None:
        with_objects = {3: add_objects}
        train_with(c, tmp_path, with_objects, {0, 1})
        rank = Rank(c, tmp_path, model=Counted())
        for number in range(STEPS):
            if number == 3:
                add_objects(rank)
            if number == 40 and c.rank == 1:
                change_one(rank)
            rank.train(number)
        rank.steps.end_steps()

    text = error_of(2, work)
    assert "ranks 0 and 1 differ in the optimizer's history[0] of inner.0.weight" in text


def test_without_the_check_nothing_is_compared(tmp_path: Path) -> None:
    def work(c: Communicator) -> None:
        rank = Rank(c, tmp_path, model=Counted(), check=False)
        for number in range(12):
            if number == 5 and c.rank == 1:
                flip_parameter(rank)
            rank.train(number)
        rank.steps.end_steps()

    run_ranks(2, work)


def test_what_is_saved_is_checked_before(tmp_path: Path) -> None:
    def work(c: Communicator) -> None:
        policy = SavePolicy(steps=4)
        train_with(c, tmp_path, {22: flip_parameter}, {1}, policy=policy)

    text = error_of(2, work)
    assert re.search(r"differ after 2[234] steps: .* comparison, after 2[012] steps", text), text


def test_a_signal_after_it_saves_no_state_that_differs(tmp_path: Path) -> None:
    def work(c: Communicator) -> None:
        rank = Rank(c, tmp_path, model=Counted(), policy=SavePolicy(steps=4))
        for number in range(22):
            rank.train(number)
        if c.rank == 1:
            flip_parameter(rank)
        with pytest.raises(ReplicasDiffer):
            until_stopped(rank, range(22, STEPS))
        steps = rank.steps.rescue()
        assert steps == (20 if c.rank == 0 else None)

    run_ranks(2, work)


@pytest.mark.parametrize("sync", ["allreduce", "notified"])
@pytest.mark.parametrize("where", ["the whole step", "only optimizer.step()"])
@pytest.mark.parametrize("hurt", [{0}, {1}, {0, 2}])
def test_a_step_that_some_ranks_leave_out_is_an_error_on_all(
    tmp_path: Path, hurt: set[int], where: str, sync: str
) -> None:
    kind = method(sync, 3)

    def work(c: Communicator) -> None:
        rank = Rank(c, tmp_path, kind=kind)
        for number in range(8):
            with run_step(rank.steps, rank.place(number)):
                leaves = number == 3 and c.rank in hurt
                if not (leaves and where == "the whole step"):
                    rank.bench.backward(number % 4)
                if not leaves:
                    rank.bench.optimizer.step()
                rank.bench.optimizer.zero_grad()
        rank.steps.end_steps()

    text = error_of(3, work)
    names = {frozenset({0}): "rank 0", frozenset({1}): "rank 1", frozenset({0, 2}): "ranks 0 and 2"}
    assert text.startswith("in step 3 optimizer.step() was called on ")
    assert f"but not on {names[frozenset(hurt)]}: " in text


@pytest.mark.parametrize("hurt", [0, 1])
def test_a_step_that_one_rank_leaves_out_is_an_error_at_once_with_shards(
    tmp_path: Path, hurt: int
) -> None:
    kind = method("sharded", 2)

    def work(c: Communicator) -> None:
        rank = Rank(c, tmp_path, kind=kind)
        rank.train(0)
        with run_step(rank.steps, rank.place(1)):
            rank.bench.backward(1)
            if c.rank != hurt:
                rank.bench.optimizer.step()
        rank.train(2)

    with pytest.raises(ConfigError, match=r"call optimizer.step\(\) on all ranks or on none"):
        run_ranks(2, work)


@pytest.mark.parametrize("sync", ["allreduce", "notified", "sharded", "int8"])
def test_a_step_that_all_ranks_leave_out_is_none(tmp_path: Path, sync: str) -> None:
    kind = method(sync, 2)

    def work(c: Communicator) -> None:
        rank = Rank(c, tmp_path, kind=kind)
        for number in range(8):
            with run_step(rank.steps, rank.place(number)):
                if number in (3, 4):
                    continue
                rank.bench.backward(number % 4)
                if number != 6:
                    rank.bench.optimizer.step()
                rank.bench.optimizer.zero_grad()
        rank.steps.end_steps()

    run_ranks(2, work)
