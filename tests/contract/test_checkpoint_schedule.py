"""Which snapshots become files: those that all ranks hold, alike on all ranks, without a wait."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.algorithms.sharded import make_sharded
from paceline.comm.communicator import Communicator
from paceline.snapshots.schedule import Request, SavePolicy
from paceline.state.checkpoint_files import Checkpoints, read_checkpoint
from tests.contract.test_steps import Rank, files, until_stopped
from tests.harness.equivalence.large_batch import convnet
from tests.harness.equivalence.put_synchronizers import notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import run_step
from tests.harness.membership.given_membership import GivenMembership

EVERY_OTHER = SavePolicy(steps=2)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Make models in the main thread, the same each time."""
    torch.manual_seed(3)


def train(rank: Rank, steps: int) -> dict[int, list[Tensor]]:
    """Train; return the weights after each step, by number of completed steps."""
    weights = {0: rank.bench.weights()}
    for number in range(steps):
        rank.train(number)
        weights[number + 1] = rank.bench.weights()
    return weights


def undisturbed(steps: int, folder: Path, model: nn.Module) -> list[list[Tensor]]:
    """Return rank 0's settled weights before each step."""

    def work(c: Communicator) -> list[list[Tensor]]:
        rank, weights = Rank(c, folder / "other", model=model), []
        for number in range(steps):
            rank.bench.replica.settle()
            weights.append(rank.bench.weights())
            rank.train(number)
        return weights

    return run_ranks(2, work)[0]


def require_weights(file: Path, weights: list[Tensor]) -> None:
    saved = read_checkpoint(file)
    for ours, theirs in zip(saved["model"].values(), weights, strict=True):
        assert torch.equal(ours, theirs)


def test_a_file_is_made_of_a_snapshot_that_all_ranks_hold_and_no_rank_settles(
    tmp_path: Path,
) -> None:
    ranks: dict[int, Rank] = {}
    settled: list[int] = []
    model = convnet()
    held: dict[int, list[bool]] = {}

    class Watched(Checkpoints):
        def write(self, step: int, state: Any, **options: Any) -> Path:
            held[step] = [
                any(name.step >= step for name in rank.steps._snapshots.held)
                for rank in ranks.values()
            ]
            return super().write(step, state, **options)

    def work(c: Communicator) -> None:
        rank = ranks[c.rank] = Rank(c, tmp_path, policy=EVERY_OTHER, model=model)
        if c.rank == 0:
            rank.steps._writer._checkpoints = Watched(tmp_path, 9)  # type: ignore[union-attr]
        settle = rank.bench.replica.settle
        rank.bench.replica.settle = (  # type: ignore[method-assign]
            lambda: (settled.append(rank.number), settle())[1]  # type: ignore[func-returns-value]
        )
        train(rank, 8)
        if c.rank == 0:
            rank.steps._writer.wait()  # type: ignore[union-attr]

    expected = undisturbed(8, tmp_path, model)
    run_ranks(2, work)
    assert settled == []
    assert held == {step: [True, True] for step in (2, 4)}  # 6 isn't committed yet
    for step, file in files(tmp_path).items():
        require_weights(file, expected[step])


@pytest.mark.parametrize("options", [{"snapshots": False}, {"kind": "sharded"}], ids=str)
def test_files_that_are_copied_at_once_are_the_same(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = convnet().float()
    kind = notified(False, (1, 1), "fp32", make_sharded) if "kind" in options else None
    more = {"kind": kind} if kind else options

    def work(c: Communicator, folder: Path, **more: Any) -> None:
        rank = Rank(c, folder, policy=EVERY_OTHER, model=model, **more)
        train(rank, 5)
        rank.steps.end_steps()
        rank.steps.finish()
        rank.bench.replica.close()

    run_ranks(2, lambda c: work(c, tmp_path / "copied", **more))
    run_ranks(2, lambda c: work(c, tmp_path / "snapshots"))
    found = files(tmp_path / "copied"), files(tmp_path / "snapshots")
    assert sorted(found[0]) == [2, 4]
    for step, file in found[0].items():
        one, other = read_checkpoint(file), read_checkpoint(found[1][step])
        assert one["position"]["sums"] == other["position"]["sums"]
        for ours, theirs in zip(one["model"].values(), other["model"].values(), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_without_snapshots_other_ranks_do_nothing_for_a_file(tmp_path: Path) -> None:
    settled: list[int] = []

    def work(c: Communicator) -> None:
        rank = Rank(c, tmp_path, policy=EVERY_OTHER, snapshots=False)
        settle = rank.bench.replica.settle
        rank.bench.replica.settle = (  # type: ignore[method-assign]
            lambda: (settled.append(c.rank), settle())[1]  # type: ignore[func-returns-value]
        )
        train(rank, 5)
        assert rank.steps._snapshots.held == ()
        rank.steps.finish()

    run_ranks(2, work)
    assert set(settled) == {0}
    assert sorted(files(tmp_path)) == [2, 4]


class Halved(nn.Module):
    """A model that saves something else than its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = convnet()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {name: value / 2 for name, value in state.items()}


def test_a_state_dict_of_the_models_own_is_what_a_file_has(tmp_path: Path) -> None:
    model = Halved()

    def work(c: Communicator) -> dict[int, list[Tensor]]:
        rank = Rank(c, tmp_path, policy=SavePolicy(steps=3), model=model)
        settled = {}
        for number in range(6):
            rank.train(number)
            rank.bench.replica.settle()
            settled[number + 1] = [weight / 2 for weight in rank.bench.weights()]
        rank.steps.end_steps()
        rank.steps.finish()
        return settled

    settled = run_ranks(2, work)[0]
    ((step, file),) = files(tmp_path).items()
    assert step == 3
    require_weights(file, settled[step])


def test_what_is_added_to_the_model_after_a_snapshot_is_in_the_file(tmp_path: Path) -> None:
    def work(c: Communicator) -> None:
        rank = Rank(c, tmp_path, policy=SavePolicy(steps=3))
        train(rank, 4)
        rank.bench.model.register_buffer("late", torch.ones(1))
        rank.train(4)
        rank.train(5)
        if c.rank == 0:
            rank.steps._writer.wait()  # type: ignore[union-attr]

    run_ranks(2, work)
    ((step, file),) = files(tmp_path).items()
    assert step == 5  # when the one of step 3 was committed
    assert "late" in read_checkpoint(file)["model"]


def rescued(ranks: int, folder: Path, steps: int, **options: Any) -> None:
    """Train, and write what is newest in memory in the middle of a step."""

    def work(c: Communicator) -> None:
        rank = Rank(c, folder, **options)
        train(rank, steps)
        rank.number = steps
        with run_step(rank.steps, rank.place(steps)):
            if c.rank == 0:
                rank.steps.rescue()
            rank.bench.backward(steps % 4)
            rank.bench.optimizer.step()

    run_ranks(ranks, work)


def test_a_rescue_finds_the_newest_snapshot_that_all_ranks_hold(tmp_path: Path) -> None:
    model = convnet()
    expected = undisturbed(6, tmp_path, model)
    rescued(2, tmp_path, 6, model=model)
    ((step, file),) = files(tmp_path).items()
    assert step == 3  # every other step has one
    require_weights(file, expected[step])
    assert read_checkpoint(file)["position"]["sums"] == [step * 11.0, 2.0 * sum(range(step))]


def test_a_rescue_of_a_rank_alone_finds_the_state_before_the_active_step(tmp_path: Path) -> None:
    rescued(1, tmp_path, 5)
    ((step, file),) = files(tmp_path).items()
    assert step == 5
    assert read_checkpoint(file)["position"]["sums"] == [5.0, 10.0]


def test_a_rescue_of_divided_state_finds_what_was_gathered(tmp_path: Path) -> None:
    model, kind = convnet().float(), notified(False, (1, 1), "fp32", make_sharded)
    rescued(2, tmp_path, 5, model=model, kind=kind)
    ((step, file),) = files(tmp_path).items()
    assert step <= 5
    state = read_checkpoint(file)["optimizer"]["state"]
    assert len(state) == len(list(model.parameters())) or step == 0


def test_a_rescue_of_a_model_with_its_own_state_dict_finds_what_was_copied(tmp_path: Path) -> None:
    rescued(2, tmp_path, 5, model=Halved())
    ((step, _),) = files(tmp_path).items()
    assert step <= 5


def test_a_file_that_is_due_when_snapshots_end_is_written(tmp_path: Path) -> None:
    """They need more memory than they may have."""

    def work(c: Communicator) -> None:
        rank = Rank(c, tmp_path, policy=SavePolicy(steps=3))
        for number in range(6):
            rank.steps._snapshots._limit_mb = 1e-3 if number == 3 else 0.0
            rank.train(number)
        rank.steps.end_steps()
        rank.steps.finish()
        assert not rank.steps._snapshots.on

    run_ranks(2, work)
    assert sorted(files(tmp_path)) == [5]  # when they ended


def test_an_epochs_end_is_committed_and_found_by_a_rescue(tmp_path: Path) -> None:
    def work(c: Communicator) -> int:
        rank = Rank(c, tmp_path)
        train(rank, 4)
        rank.steps.end_steps()
        if c.rank == 0:
            rank.steps.rescue()
        name = rank.steps._snapshots.newest_committed
        assert name is not None
        return name.step

    assert run_ranks(2, work) == [4, 4]
    assert sorted(files(tmp_path)) == [4]


def test_no_more_is_retained_than_the_next_file_may_need(tmp_path: Path) -> None:
    def work(c: Communicator) -> None:
        rank = Rank(c, tmp_path)
        schedule = rank.steps._checkpoints
        for number in range(12):
            rank.train(number)
            assert len(schedule._sums) <= 4
        rank.steps.end_steps()
        rank.steps.save()
        assert schedule._copied is None

    run_ranks(2, work)


def test_a_snapshot_whose_sums_are_not_known_yet_is_not_written(tmp_path: Path) -> None:
    """That of an earlier generation, before all ranks have reported again."""

    def work(c: Communicator) -> list[bool]:
        rank = Rank(c, tmp_path)
        train(rank, 6)
        schedule = rank.steps._checkpoints
        found = [schedule.newest() is not None]
        schedule._sums.clear()
        return [*found, schedule.newest() is not None]

    assert run_ranks(2, work) == [[True, False]] * 2


def test_divided_state_is_gathered_in_under_half_a_per_cent_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([10.0, 10.5, 110.4, 110.6, 110.7, 210.7])
    kind = notified(False, (1,), "fp32", make_sharded)

    def work(c: Communicator) -> list[Request]:
        rank = Rank(c, tmp_path, model=convnet().float(), kind=kind)
        schedule = rank.steps._checkpoints
        with monkeypatch.context() as patched:
            clock = SimpleNamespace(monotonic=lambda: next(now))
            patched.setattr("paceline.snapshots.schedule.time", clock)
            schedule._copy_now()  # from 10.0 to 10.5: the next is due 100 s later
            requests = [schedule._request(0) for _ in range(4)]
        rank.bench.replica.close()
        return requests

    nothing, copy = Request.NOTHING, Request.COPY
    assert run_ranks(1, work) == [[nothing, copy, nothing, copy]]


@pytest.mark.parametrize("options", [{}, {"snapshots": False}], ids=str)
def test_steps_that_train_several_batches_have_files_of_the_completed_ones(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Batches 0 and 1, then 2 and 3, and so on: a step has its last batch's number."""
    model, numbers = convnet(), (1, 3, 5, 7, 9, 11)

    def work(c: Communicator, folder: Path, *, settling: bool = False) -> dict[int, list[Tensor]]:
        rank = Rank(c, folder, policy=SavePolicy(steps=4), model=model, **options)
        weights = {}
        for number in numbers:
            if settling:
                rank.bench.replica.settle()
                weights[number - 1] = rank.bench.weights()
            rank.train(number)
        rank.steps.end_steps()
        rank.steps.finish()
        return weights

    expected = run_ranks(2, lambda c: work(c, tmp_path / "other", settling=True))[0]
    run_ranks(2, lambda c: work(c, tmp_path))
    assert sorted(files(tmp_path)) == [4, 8]
    for step, file in files(tmp_path).items():
        require_weights(file, expected[step])
        done = [number for number in numbers if number < step]
        sums = [11.0 * len(done), 2.0 * sum(done)]
        assert read_checkpoint(file)["position"]["sums"] == sums


@pytest.mark.parametrize("enabled", [True, False])
def test_rank_0_decides_whether_snapshots_are_taken(tmp_path: Path, enabled: bool) -> None:
    def work(c: Communicator) -> bool:
        own = enabled if c.rank == 0 else not enabled
        rank = Rank(c, tmp_path, policy=EVERY_OTHER, snapshots=own)
        train(rank, 5)
        rank.steps.end_steps()
        rank.steps.save()
        rank.steps.finish()
        return bool(rank.steps._snapshots.held)

    assert run_ranks(2, work) == [enabled] * 2
    assert sorted(files(tmp_path)) == [2, 4, 5]


@pytest.mark.parametrize("steps", [1, 2])
def test_rank_0_may_save_by_itself_between_files_that_are_due(tmp_path: Path, steps: int) -> None:
    """Other ranks don't know of it, and decide alike all the same."""

    def work(c: Communicator) -> None:
        rank = Rank(c, tmp_path, policy=SavePolicy(steps=steps))
        for number in range(9):
            if c.rank == 0 and number in (4, 5):
                rank.steps.save(together=False)
            rank.train(number)
        rank.steps.end_steps()
        rank.steps.finish()

    run_ranks(2, work)
    due = {step for step in range(1, 9) if step % steps == 0}
    assert set(files(tmp_path)) == due | {4, 5}


def test_a_stop_in_the_step_that_switches_snapshots_off_is_saved(tmp_path: Path) -> None:
    def work(c: Communicator) -> int:
        rank = Rank(c, tmp_path, stop_in={1})
        rank.steps._snapshots._limit_mb = 1e-6
        return until_stopped(rank)

    for ranks, stopped in ((1, 1), (2, 3)):
        assert run_ranks(ranks, work) == [stopped] * ranks
        assert stopped in files(tmp_path)


def test_what_is_added_to_model_and_optimizer_is_in_a_copy_before_the_next_step(
    tmp_path: Path,
) -> None:
    def work(c: Communicator) -> None:
        rank = Rank(c, tmp_path)
        train(rank, 3)
        late = nn.Linear(2, 2).double()
        rank.bench.model.add_module("late", late)
        rank.bench.optimizer.add_param_group({"params": [late.weight], "lr": 0.5})
        rank.steps.save()
        rank.steps.finish()

    run_ranks(2, work)
    saved = read_checkpoint(files(tmp_path)[3])
    assert {"late.weight", "late.bias"} <= saved["model"].keys()
    assert saved["optimizer"]["param_groups"][1]["lr"] == 0.5


def test_a_rescue_between_two_generations_finds_the_newest_snapshot(tmp_path: Path) -> None:
    def work(c: Communicator) -> None:
        rank = Rank(c, tmp_path)
        train(rank, 6)
        c.all_reduce(torch.zeros(1)).wait("all ranks")
        rank.bench.replica.leave_generation()
        rank.steps._checkpoints.begin_generation(6, saved=False)
        if c.rank == 0:
            rank.steps.rescue()

    run_ranks(2, work)
    assert sorted(files(tmp_path)) == [3]


def test_a_leader_that_is_outside_the_world_writes_no_file(tmp_path: Path) -> None:
    """As one that wakes up, and has not learned that the others continue without it."""
    found: list[list[int]] = []

    def work(c: Communicator) -> None:
        rank = Rank(c, tmp_path, policy=EVERY_OTHER)
        for first, in_world in ((0, False), (6, True)):
            membership = GivenMembership(may_write=lambda known=in_world: known)
            if rank.steps._writer is not None:
                rank.steps._writer._membership = membership
            for number in range(first, first + 6):
                rank.train(number)
            if c.rank == 0:
                rank.steps._writer.wait()  # type: ignore[union-attr]
                found.append(sorted(files(tmp_path)))
        rank.bench.replica.close()

    run_ranks(2, work)
    assert not found[0]
    assert found[1]
    assert min(found[1]) >= 4  # which is committed two steps later


class Taught(nn.Module):
    """A model with a frozen part that the optimizer doesn't have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = convnet()
        self.teacher = nn.Linear(2, 2).double().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def test_a_frozen_module_that_is_replaced_is_in_later_files(tmp_path: Path) -> None:
    model = Taught()

    def work(c: Communicator) -> None:
        rank = Rank(c, tmp_path, policy=EVERY_OTHER, model=model)
        trained = list(rank.bench.model.inner.parameters())  # type: ignore[union-attr]
        rank.bench.optimizer.param_groups[0]["params"][:] = trained
        for number in range(7):
            if number == 3:
                teacher = nn.Linear(2, 2).double().requires_grad_(False)
                nn.init.constant_(teacher.weight, 7.0)
                nn.init.zeros_(teacher.bias)  # all values are the same on all ranks
                rank.bench.model.teacher = teacher
            rank.train(number)
        rank.steps.end_steps()
        rank.steps.finish()

    run_ranks(2, work)
    for step, file in files(tmp_path).items():
        weight = read_checkpoint(file)["model"]["teacher.weight"]
        assert bool((weight == 7.0).all()) is (step > 2), step
