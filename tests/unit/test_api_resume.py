"""A run of the library goes on where it was stopped, as if it hadn't been."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import Dataset

import paceline
from paceline import ConfigError
from paceline.cli.ledger import main as ledger
from tests.harness.library.small_training import BATCH, copied, loss_of, network, samples, sgd
from tests.harness.processes.run_folders import events

EPOCHS, STEPS = 3, 5  # of 50 samples
PLAIN: Mapping[str, Any] = {}
SHARDED = {"sync": "notified", "update": "sharded"}
AVERAGED = {"sync": "average:every=4,delay=2,outer=diloco"}
Schedule = Callable[[torch.optim.Optimizer], Any]


class Killed(Exception):
    """The process came to its end here."""


class Noisy(Dataset[Any]):
    """Samples with random noise."""

    def __init__(self) -> None:
        self._samples = samples()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self._samples[index]
        return x + 0.1 * torch.randn(6, dtype=torch.float64), y


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def train(
    run: Path | None,
    *,
    die_before: int | None = None,
    make_schedule: Schedule = step_lr,
    in_step: bool = False,
    words: bool = False,
    how: Mapping[str, Any] = PLAIN,
    **options: Any,
) -> tuple[dict[int, float], dict[str, Tensor]]:
    """Train; return each step's loss, and the model's state."""
    losses = {}
    with paceline.join(run, **options) as world:
        model = network(dropout=0.3, words=words)
        optimizer = sgd(model)
        paceline.parallelize(model, optimizer, world, **how)
        schedule = make_schedule(optimizer)
        world.track(schedule)
        loader = paceline.loader(Noisy(), BATCH, world)
        for _ in range(loader.epoch, EPOCHS):
            for x, y in loader:
                if world.steps == die_before:
                    raise Killed
                number = world.steps
                with world.step():
                    loss = loss_of(model, x, y)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                losses[number] = loss.item()
                if in_step:
                    schedule.step()
            if not in_step:
                schedule.step()
        return losses, copied(model)


def killed(run: Path, at: int, **options: Any) -> dict[int, float]:
    """Train until the process is killed before a step; return nothing of what it had in memory."""
    with pytest.raises(Killed):
        train(run, die_before=at, **options)
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()  # a killed process writes no more
    return {}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    ("at", "how"),
    [*((at, PLAIN) for at in (1, 4, 5, 6, 9, 14)), (6, SHARDED), (7, AVERAGED)],
    ids=str,
)
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, at: int, how: Mapping[str, Any]) -> None:
    expected, state = train(None, how=how)
    killed(tmp_path / "run", at, how=how, checkpoint_steps=2)
    losses, resumed = train(tmp_path / "run", how=how, checkpoint_steps=2)
    assert losses == {number: expected[number] for number in losses}
    assert set(losses) >= set(range(at, EPOCHS * STEPS))
    assert_equal(resumed, state)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (PLAIN, AVERAGED, "all workers begin with its weights, and each with its momenta"),
        (
            AVERAGED,
            PLAIN,
            "from the merged weights with the momenta of worker 0",
        ),
        (AVERAGED, {"sync": "average:every=3,fragments=2"}, "other workers or fragments"),
    ],
)
def test_a_run_resumes_with_another_method_and_says_what_becomes_of_the_workers_state(
    tmp_path: Path,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    sentence: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    killed(tmp_path / "run", 7, how=before, checkpoint_steps=2)
    losses, _ = train(tmp_path / "run", how=after, checkpoint_steps=2)
    assert sentence in capfd.readouterr().err
    assert max(losses) == EPOCHS * STEPS - 1
    assert min(losses) > 0


def test_a_run_with_sparse_momenta_goes_on_bit_for_bit(tmp_path: Path) -> None:
    expected, state = train(None, words=True)
    killed(tmp_path / "run", 7, words=True, checkpoint_steps=2)
    losses, resumed = train(tmp_path / "run", words=True, checkpoint_steps=2)
    assert losses == {number: expected[number] for number in losses}
    assert min(losses) > 0
    assert_equal(resumed, state)


SCHEDULES: dict[str, Schedule] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 7, 11]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 15),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 15),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=15),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 10)], [5]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.95), lr_scheduler.LinearLR(o)]
    ),
}


@pytest.mark.parametrize("make_schedule", list(SCHEDULES.values()), ids=list(SCHEDULES))
def test_any_scheduler_goes_on(tmp_path: Path, make_schedule: Schedule) -> None:
    _, state = train(None, make_schedule=make_schedule, in_step=True)
    killed(tmp_path / "run", 8, checkpoint_steps=3, make_schedule=make_schedule, in_step=True)
    losses, resumed = train(tmp_path / "run", make_schedule=make_schedule, in_step=True)
    assert 0 not in losses
    assert_equal(resumed, state)


def test_a_finished_run_makes_no_step_more(tmp_path: Path) -> None:
    _, state = train(tmp_path / "run")
    losses, again = train(tmp_path / "run")
    assert losses == {}
    assert_equal(again, state)


def test_a_checkpoint_by_time_is_of_a_step_made_since(tmp_path: Path) -> None:
    train(tmp_path, checkpoint_minutes=1e-9, keep_checkpoints=100)
    saved = [int(path.stem[5:]) for path in sorted((tmp_path / "checkpoints").glob("step-*.pt"))]
    assert saved == list(range(1, len(saved) + 1))


def test_a_checkpoint_on_demand_is_what_a_run_goes_on_from(tmp_path: Path) -> None:
    with paceline.join(tmp_path / "run") as world:
        model = network()
        optimizer = sgd(model)
        paceline.parallelize(model, optimizer, world)
        loader = paceline.loader(samples(), BATCH, world)
        for x, y in loader:
            with world.step():
                loss_of(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if loader.step == 2:
                break
        world.checkpoint()
        state = copied(model)
    plain = torch.load(tmp_path / "run/checkpoints/step-00000003.pt", weights_only=True)
    assert_equal(plain["model"], state)
    with paceline.join(tmp_path / "run") as world:
        fresh = network()
        paceline.parallelize(fresh, sgd(fresh), world)
        assert_equal(copied(fresh), state)
        assert (world.steps, world.epoch, world.generation) == (3, 0, 1)


def test_a_checkpoint_within_the_loop_has_what_the_script_does_before_the_next_step(
    tmp_path: Path,
) -> None:
    def train(run: Path | None, die_before: int = -1) -> dict[str, Tensor]:
        with paceline.join(run) as world:
            model = network()
            optimizer = sgd(model)
            paceline.parallelize(model, optimizer, world)
            schedule = step_lr(optimizer)
            world.track(schedule)
            loader = paceline.loader(samples(), BATCH, world)
            for _ in range(loader.epoch, 2):
                for x, y in loader:
                    if world.steps == die_before:
                        raise Killed
                    with world.step():
                        loss_of(model, x, y).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    if run is not None and world.steps in (3, STEPS):
                        world.checkpoint()
                    schedule.step()
            return copied(model)

    state = train(None)
    for die_before, saved in ((4, 3), (STEPS + 1, STEPS)):
        run = tmp_path / str(die_before)
        with pytest.raises(Killed):
            train(run, die_before)
        assert (run / f"checkpoints/step-{saved:08}.pt").exists()
        assert_equal(train(run), state)


def test_what_a_killed_writer_left_half_done_is_removed(tmp_path: Path) -> None:
    killed(tmp_path / "run", 3, checkpoint_steps=2)
    half = tmp_path / "run/checkpoints/.step-00000003.pt.part"
    half.write_bytes(b"half")
    with paceline.join(tmp_path / "run"):
        assert not half.exists()


def test_a_start_is_counted_though_the_count_of_starts_is_lost(tmp_path: Path) -> None:
    killed(tmp_path / "run", 7, checkpoint_steps=2)
    (tmp_path / "run/generation").unlink()
    train(tmp_path / "run")
    lines = events(tmp_path / "run")
    assert [line["generation"] for line in lines if line["event"] == "run"] == [0, 1]
    assert ledger([str(tmp_path / "run")]) == 0


def test_a_loop_without_a_loader_goes_on(tmp_path: Path) -> None:
    x, y = samples(12)[:]

    def loop(run: Path | None, until: int) -> dict[str, Tensor]:
        with paceline.join(run) as world:
            model = network(dropout=0.3)
            optimizer = sgd(model)
            paceline.parallelize(model, optimizer, world)
            for _ in range(world.steps, until):
                with world.step():
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return copied(model)

    loop(tmp_path / "run", 3)
    assert_equal(loop(tmp_path / "run", 7), loop(None, 7))
    lines = events(tmp_path / "run")
    taken = [(line["first"], line["last"]) for line in lines if line["event"] == "step"]
    assert taken == [(number, number + 1) for number in range(7)]


def test_accumulation_over_batches_goes_on_with_the_same_dropout(tmp_path: Path) -> None:
    def loop(run: Path | None, die_before: int | None = None) -> dict[str, Tensor]:
        with paceline.join(run, checkpoint_steps=4) as world:
            model = network(dropout=0.3)
            optimizer = sgd(model)
            paceline.parallelize(model, optimizer, world)
            loader = paceline.loader(samples(72), BATCH, world)
            for _ in range(loader.epoch, 2):
                for x, y in loader:
                    if world.steps == die_before:
                        raise Killed
                    if loader.step % 2 == 0:
                        loss_of(model, x, y).backward()
                        continue
                    with world.step():
                        loss_of(model, x, y).backward()
                        optimizer.step()
                        optimizer.zero_grad()
            return copied(model)

    with pytest.raises(Killed):
        loop(tmp_path / "run", die_before=6)
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    names = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert "step-00000004.pt" in names
    assert_equal(loop(tmp_path / "run"), loop(None))


def test_another_runs_checkpoint_is_a_start(tmp_path: Path) -> None:
    _, state = train(tmp_path / "one")
    best = tmp_path / "one/checkpoints/step-00000015.pt"
    losses, other = train(tmp_path / "two", resume=best)
    assert losses == {}
    assert_equal(other, state)


def test_a_torn_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, state = train(tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step-00000015.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    losses, again = train(tmp_path / "run")
    assert set(losses) == set(range(10, 15))
    assert_equal(again, state)
    assert str(newest) in capfd.readouterr().err


def loop_of(run: Path, *, batch: int = BATCH, seed: int = 0, track: int = 0) -> None:
    with paceline.join(run, seed=seed) as world:
        model = network()
        optimizer = sgd(model)
        paceline.parallelize(model, optimizer, world)
        for _ in range(track):
            world.track(step_lr(optimizer))
        for x, y in paceline.loader(samples(), batch, world):
            with world.step():
                loss_of(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch": 10}, "batch_size is 10, but was 12 when the checkpoint was written"),
        ({"seed": 4}, "^run r: this run was started with seed 0, but seed is now 4.*another run"),
        ({"track": 2}, r"no state of StepLR 2 \(it has StepLR\)"),
        ({"track": 0}, "the state of StepLR, which isn't tracked"),
    ],
    ids=str,
)
def test_a_script_that_changed(tmp_path: Path, change: dict[str, int], sentence: str) -> None:
    loop_of(tmp_path / "r", track=1)
    with pytest.raises(ConfigError, match=sentence):
        loop_of(tmp_path / "r", **{"track": 1, **change})


def test_a_run_that_must_not_go_on(tmp_path: Path) -> None:
    loop_of(tmp_path / "r")
    with pytest.raises(ConfigError, match=r"^resume no: run r already exists; give another run"):
        paceline.join(tmp_path / "r", resume="no")


def test_another_model(tmp_path: Path) -> None:
    loop_of(tmp_path / "r")
    with paceline.join(tmp_path / "r") as world:
        other = torch.nn.Linear(3, 3)
        with pytest.raises(ConfigError, match="resume auto: the checkpoint's model doesn't fit"):
            paceline.parallelize(other, sgd(other), world)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^run: .* can't be written"):
        paceline.join(tmp_path / "file/run")


def test_what_a_wire_has_yet_to_send_follows_the_scaler_that_is_tracked() -> None:
    with paceline.join() as world:
        model = network()
        model, optimizer = paceline.parallelize(model, sgd(model), world)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
        world.track(step_lr(optimizer), scaler)
        with world.step(samples=1):
            optimizer.step()
        replica = world._loop.require_replica("a test")
        assert replica._scaler is not None
        assert replica._scaler.get_scale() == 2.0**7
