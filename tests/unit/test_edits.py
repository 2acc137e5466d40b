"""A hyperparameter that is edited between two starts wins and is said; all else continues."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop, lr_scheduler

import paceline
from paceline import ConfigError
from paceline.session.resume.edits import GIVEN, GivenHyperparameters
from tests.harness.library.small_training import BATCH, loss_of, network, samples

STEPS, PER_EPOCH = 5, 5
Make = Callable[[Any], Optimizer]
Schedule = Callable[[Optimizer], Any]


class Start:
    """A start's optimizer and schedule, made and restored as a script's are."""

    def __init__(
        self,
        make: Make,
        schedule: Schedule | None = None,
        checkpoint: dict[str, Any] | None = None,
        *,
        reset: bool = False,
    ) -> None:
        self.model = nn.Linear(3, 2)
        self.optimizer = make(self.model.parameters())
        self.given = GivenHyperparameters(reset_optimizer=reset, tracked_entry="tracked")
        self.given.add_optimizer("optimizer", self.optimizer, self.model)
        saved = checkpoint or {}
        if checkpoint is not None:
            self.optimizer.load_state_dict(self.given.edited(saved)["optimizer"])
        self.schedule = schedule and schedule(self.optimizer)
        if self.schedule is not None:
            self.given.add_object("schedule", self.schedule)
            if checkpoint is not None:
                edited = self.given.edited(saved)
                self.schedule.load_state_dict(edited["tracked"]["schedule"])
                self.optimizer.load_state_dict(edited["optimizer"])
        self.said = [str(text) for text in self.given.notes(saved)]

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    def train(self, steps: int = STEPS) -> list[float]:
        rates = []
        for _ in range(steps):
            self.model(torch.ones(4, 3)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            rates.append(self.group["lr"])
            if self.schedule is not None:
                self.schedule.step()
        return rates

    def checkpoint(self) -> dict[str, Any]:
        tracked = {"schedule": self.schedule.state_dict()} if self.schedule else {}
        state = {"optimizer": self.optimizer.state_dict(), "tracked": tracked}
        return copy.deepcopy({**state, GIVEN: self.given.entries})


def sgd(parameters: Any, lr: float = 0.1, **options: Any) -> Optimizer:
    return SGD(parameters, lr=lr, momentum=options.pop("momentum", 0.9), **options)


def resumed(
    make: Make, schedule: Schedule | None, edited: Make, edited_schedule: Schedule | None
) -> tuple[Start, Start]:
    """Return a start that trained, and one from its checkpoint with the edited values."""
    first = Start(make, schedule)
    first.train()
    return first, Start(edited, edited_schedule, first.checkpoint())


@pytest.mark.parametrize(
    ("make", "edit", "said"),
    [
        (sgd, {"lr": 0.01}, "lr 0.01 replaces the checkpoint's 0.1."),
        (sgd, {"momentum": 0.5}, "momentum 0.5 replaces the checkpoint's 0.9."),
        (sgd, {"weight_decay": 0.01}, "weight_decay 0.01 replaces the checkpoint's 0."),
        (sgd, {"nesterov": True}, "nesterov True replaces the checkpoint's False."),
        (Adam, {"betas": (0.8, 0.99)}, "betas 0.8, 0.99 replaces the checkpoint's 0.9, 0.999."),
        (Adam, {"amsgrad": True}, "amsgrad True replaces the checkpoint's False."),
        (RMSprop, {"momentum": 0.5}, "momentum 0.5 replaces the checkpoint's 0."),
        (RMSprop, {"centered": True}, "centered True replaces the checkpoint's False."),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_edited_option_of_an_optimizer_wins(make: Make, edit: dict[str, Any], said: str) -> None:
    first, second = resumed(make, None, partial(make, **edit), None)
    (name, value) = next(iter(edit.items()))
    assert second.group[name] == value
    assert second.said == [said]
    assert {k: v for k, v in second.group.items() if k not in ("params", name)} == {
        k: v for k, v in first.group.items() if k not in ("params", name)
    }
    assert second.optimizer.state_dict()["state"].keys() == {0, 1}
    second.train()


def test_nothing_is_said_where_nothing_is_edited_though_a_schedule_changed_the_rate() -> None:
    step = partial(lr_scheduler.StepLR, step_size=2)
    first, second = resumed(sgd, step, sgd, step)
    assert second.said == []
    assert first.train() == second.train()


def test_a_rate_that_a_script_changed_by_itself_continues() -> None:
    first = Start(sgd)
    first.group["lr"] = 0.003
    second = Start(sgd, None, first.checkpoint())
    assert (second.group["lr"], second.said) == (0.003, [])


@pytest.mark.parametrize(
    "schedule",
    [
        partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
        partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
        partial(lr_scheduler.CosineAnnealingLR, T_max=20),
        partial(lr_scheduler.ExponentialLR, gamma=0.9),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)],
            [3],
        ),
    ],
)
def test_an_edited_rate_keeps_the_schedule(schedule: Schedule) -> None:
    _, second = resumed(sgd, schedule, partial(sgd, lr=0.01), schedule)
    expected = Start(partial(sgd, lr=0.01), schedule)
    expected.train()
    assert second.said == ["lr 0.01 replaces the checkpoint's 0.1."]
    assert second.train() == pytest.approx(expected.train())


def test_more_steps_of_a_cycle_of_rates_than_the_checkpoint_has() -> None:
    """As in https://github.com/deepinsight/insightface/pull/2143."""

    def cycle(total: int, rate: float) -> Schedule:
        return partial(lr_scheduler.OneCycleLR, max_lr=rate, total_steps=total)

    _, second = resumed(sgd, cycle(5 + 1, 0.1), sgd, cycle(20, 0.1))
    expected = Start(sgd, cycle(20, 0.1))
    expected.train()
    assert "schedule's total_steps 20 replaces the checkpoint's 6" in second.said[0]
    assert second.train(10)[1:] == pytest.approx(expected.train(10)[1:])
    _, second = resumed(sgd, cycle(20, 0.1), sgd, cycle(20, 0.05))
    expected = Start(sgd, cycle(20, 0.05))
    expected.train()
    assert "max_lr 0.05 replaces the checkpoint's 0.1" in second.said[0]
    assert second.train(10) == pytest.approx(expected.train(10))
    _, second = resumed(sgd, cycle(20, 0.1), sgd, cycle(20, 0.1))
    assert second.said == []


def test_an_edited_cycle_of_rates() -> None:
    def cycle(rate: float) -> Schedule:
        return partial(lr_scheduler.CyclicLR, base_lr=rate, max_lr=10 * rate, step_size_up=3)

    _, second = resumed(sgd, cycle(0.01), sgd, cycle(0.02))
    expected = Start(sgd, cycle(0.02))
    expected.train()
    assert "schedule's max_lrs 0.2 replaces the checkpoint's 0.1" in second.said[0]
    assert second.train() == pytest.approx(expected.train())


def test_edited_milestones_and_patience() -> None:
    """As in https://github.com/mosaicml/composer/issues/3154."""
    early = partial(lr_scheduler.MultiStepLR, milestones=[3, 7])
    _, second = resumed(sgd, early, sgd, partial(lr_scheduler.MultiStepLR, milestones=[6, 8, 8]))
    assert second.said == ["schedule's milestones 6, 8 replaces the checkpoint's 3, 7."]
    assert second.train(4) == pytest.approx([0.01, 0.001, 0.001, 0.00001])
    first = Start(sgd, partial(lr_scheduler.ReduceLROnPlateau, patience=2))
    first.schedule.step(1.0)
    patient = partial(lr_scheduler.ReduceLROnPlateau, patience=5)
    second = Start(sgd, patient, first.checkpoint())
    assert (second.schedule.patience, second.schedule.best) == (5, 1.0)
    assert second.said == ["schedule's patience 5 replaces the checkpoint's 2."]


def test_a_loss_scalers_state_continues_and_its_options_are_edited() -> None:
    def scaler(interval: int) -> Any:
        return torch.amp.GradScaler("cpu", growth_interval=interval)

    first = Start(sgd, lambda _: scaler(2000))
    first.schedule.load_state_dict({**first.schedule.state_dict(), "scale": 8.0})
    second = Start(sgd, lambda _: scaler(100), first.checkpoint())
    assert second.schedule.get_scale() == 8.0
    assert second.said == ["schedule's growth_interval 100 replaces the checkpoint's 2000."]


class Average:
    """An object of a script's own: which of its values are options isn't known."""

    def __init__(self, decay: float) -> None:
        self.values: dict[str, Any] = {"decay": decay, "updates": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def test_what_another_object_was_given_is_not_replaced_but_said() -> None:
    first = Start(sgd, lambda _: Average(0.9))
    first.schedule.values["updates"] = 7
    second = Start(sgd, lambda _: Average(0.99), first.checkpoint())
    assert second.schedule.values == {"decay": 0.9, "updates": 7}
    assert second.said == [
        "The state of tracked objects is the checkpoint's: schedule's decay stays 0.9, not 0.99."
    ]


def test_a_file_of_an_earlier_version_is_compared_with_its_groups() -> None:
    step = partial(lr_scheduler.StepLR, step_size=2)
    first = Start(sgd, step)
    first.train()
    earlier = {key: value for key, value in first.checkpoint().items() if key != GIVEN}
    same = Start(sgd, step, earlier)
    assert same.said == []
    assert same.train() == first.train()
    edited = Start(partial(sgd, lr=0.01, momentum=0.5), step, earlier)
    assert edited.said == [
        "lr 0.01 replaces the checkpoint's 0.1, momentum 0.5 replaces the checkpoint's 0.9."
    ]
    assert edited.group["lr"] == pytest.approx(0.01 * 0.1**2)


@pytest.mark.parametrize(("before", "now"), [(sgd, Adam), (Adam, sgd), (AdamW, Adam)])
def test_another_class_of_optimizer_is_refused_by_name_or_begins_anew(
    before: Make, now: Make
) -> None:
    """As in https://github.com/ultralytics/yolov3/issues/80 and pytorch/pytorch/issues/7499."""
    step = partial(lr_scheduler.ExponentialLR, gamma=0.5)
    first = Start(before, step)
    first.train()
    names = (type(first.optimizer).__name__, type(Start(now).optimizer).__name__)
    with pytest.raises(ConfigError, match=f"optimizer {names[0]}, but this start has {names[1]}"):
        Start(now, step, first.checkpoint())
    anew = Start(now, step, first.checkpoint(), reset=True)
    assert anew.optimizer.state_dict()["state"] == {}
    assert anew.said == ["the optimizer's state begins anew, because of --reset_optimizer."]
    assert anew.train() == pytest.approx([anew.group["initial_lr"] / 2**n for n in range(5, 10)])
    again = Start(now, step, anew.checkpoint(), reset=True)
    assert again.optimizer.state_dict()["state"].keys() == {0, 1}
    assert again.said == []


@pytest.mark.parametrize("make", [sgd, Adam])
def test_state_follows_a_parameter_to_another_place_in_its_group(make: Make) -> None:
    """As in https://github.com/pytorch/pytorch/pull/6031: a list that was made of a set."""
    first = Start(make)
    first.train()
    second = Start(lambda parameters: make([*parameters][::-1]), None, first.checkpoint())
    before, now = first.model.parameters(), second.model.parameters()
    for own, restored in zip(before, now, strict=True):
        expected = first.optimizer.state[own]
        for key, value in second.optimizer.state[restored].items():
            assert torch.equal(value, expected[key])


def in_groups(places: list[list[int]], parameters: Any) -> Optimizer:
    listed = [*parameters]
    return sgd([{"params": [listed[place] for place in group]} for group in places])


@pytest.mark.parametrize(
    ("before", "now", "which"),
    [
        ([[0], [1]], [[1], [0]], "bias is in group 0 of this start's optimizer"),
        ([[0, 1]], [[0]], "bias is in group 0 of the checkpoint's optimizer"),
        ([[0]], [[1]], "bias is in group 0 of this start's optimizer"),
        ([[0]], [[0], [1]], "bias is in group 1 of this start's optimizer"),
    ],
)
def test_other_parameters_in_a_group_are_refused_by_name(
    before: list[list[int]], now: list[list[int]], which: str
) -> None:
    """As in https://github.com/facebookresearch/GloRe/issues/8; torch takes those of equal size."""
    first = Start(partial(in_groups, before))
    first.train()
    with pytest.raises(ConfigError, match=f"{which}, but not of .*anew with --reset_optimizer"):
        Start(partial(in_groups, now), None, first.checkpoint())
    anew = Start(partial(in_groups, now), None, first.checkpoint(), reset=True)
    assert anew.optimizer.state_dict()["state"] == {}


def sequence(second: type[lr_scheduler.LRScheduler], optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer), second(optimizer, 9)]  # type: ignore[call-arg]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (partial(lr_scheduler.StepLR, step_size=9), partial(lr_scheduler.ExponentialLR, gamma=0.9)),
        (partial(sequence, lr_scheduler.StepLR), partial(sequence, lr_scheduler.CosineAnnealingLR)),
    ],
)
def test_another_class_of_schedule_is_refused_by_name(before: Schedule, now: Schedule) -> None:
    """Another class's state is mixed with the schedule's own by load_state_dict()."""
    with pytest.raises(ConfigError, match=r"state of a .*StepLR as schedule, but this start .* a "):
        resumed(sgd, before, sgd, now)


def test_another_type_of_parameters_is_said() -> None:
    first = Start(sgd)
    first.train()
    second = Start(sgd)
    second.model.double()
    given = GivenHyperparameters()
    given.add_optimizer("optimizer", second.optimizer, second.model)
    said = "parameters' type float64 replaces the checkpoint's float32."
    assert given.notes(first.checkpoint()) == [said]


def loop(run: Path, epochs: int, make: Make = sgd, *, early: bool = False, **join: Any) -> Any:
    """Train a script's loop; return its optimizer and schedule."""
    with paceline.join(run, **join) as world:
        model = network()
        optimizer = make(model.parameters())
        schedule = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        if early:
            world.track(schedule)
        paceline.parallelize(model, optimizer, world)
        if not early:
            world.track(schedule)
        loader = paceline.loader(samples(), BATCH, world)
        for _ in range(loader.epoch, epochs):
            for x, y in loader:
                with world.step():
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            schedule.step()
        return optimizer, schedule


@pytest.mark.parametrize("early", [False, True], ids=["tracked after", "tracked before"])
def test_a_script_that_is_edited(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], early: bool
) -> None:
    loop(tmp_path / "run", 1, early=early)
    optimizer, schedule = loop(tmp_path / "run", 2, partial(sgd, lr=0.02, momentum=0), early=early)
    assert optimizer.param_groups[0]["momentum"] == 0
    assert schedule.get_last_lr() == [0.02 * 0.25]
    said = "paceline: lr 0.02 replaces the checkpoint's 0.1, momentum 0 replaces the checkpoint's"
    assert said in capfd.readouterr().err
    optimizer, schedule = loop(tmp_path / "run", 3, partial(sgd, lr=0.02, momentum=0), early=early)
    assert schedule.get_last_lr() == [0.02 * 0.125]
    assert "replaces" not in capfd.readouterr().err


def test_a_script_with_another_optimizer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loop(tmp_path / "run", 1)
    with pytest.raises(ConfigError, match=r"give SGD, or begin .* anew with join\(reset_optimizer"):
        loop(tmp_path / "run", 2, partial(Adam, lr=0.1))
    assert "the same command" not in capfd.readouterr().err
    optimizer, _ = loop(tmp_path / "run", 2, partial(Adam, lr=0.1), reset_optimizer=True)
    steps = [int(state["step"]) for state in optimizer.state.values()]
    assert set(steps) == {PER_EPOCH}
    assert "because of join(reset_optimizer=True)" in capfd.readouterr().err
    optimizer, _ = loop(tmp_path / "run", 3, partial(Adam, lr=0.1), reset_optimizer=True)
    steps = [int(state["step"]) for state in optimizer.state.values()]
    assert set(steps) == {2 * PER_EPOCH}


def refused_loop(run: Path, note: str = "") -> None:
    with paceline.join(run) as world:
        (run / "labels.txt").write_text("cat\n")  # as `paceline train` does
        if note:
            (run / "note.txt").write_text(note)
        norm = nn.BatchNorm1d(3)
        paceline.parallelize(norm, sgd(norm.parameters()), world)


def test_a_start_that_is_refused_leaves_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        paceline.join(tmp_path / "run", resume=tmp_path / "missing.pt")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="single BatchNorm"):
        refused_loop(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_refused_start_keeps_what_others_have_put_into_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="there is no such file"):
        paceline.join(tmp_path / "run", resume=tmp_path / "missing.pt")
    assert (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="single BatchNorm"):
        refused_loop(tmp_path / "own", note="of the script")
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["note.txt"]


def test_a_refused_start_of_a_run_that_was_there_keeps_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loop(tmp_path / "run", 1)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ConfigError, match="single BatchNorm"):
        refused_loop(tmp_path / "run")
    assert names <= {path.name for path in (tmp_path / "run").iterdir()}
    assert "is saved" not in capfd.readouterr().err


def draws(run: Path, epochs: int) -> dict[int, list[float]]:
    """Return what a loop draws of each stream before each step and in it."""
    drawn = {}
    with paceline.join(run, checkpoint_steps=1) as world:
        model = network()
        optimizer = sgd(model.parameters())
        paceline.parallelize(model, optimizer, world)
        loader = paceline.loader(samples(), BATCH, world)
        for _ in range(loader.epoch, epochs):
            for x, y in loader:
                before = [random.random(), float(np.random.rand())]
                with world.step():
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    inside = [random.random(), float(np.random.rand())]
                drawn[world.steps] = before + inside
            random.random()
            np.random.rand(7)
    return drawn


def test_what_numpy_and_python_draw_in_a_step_is_the_same_in_a_resumed_run(tmp_path: Path) -> None:
    """As in https://github.com/open-mmlab/mmdetection/issues/4193 (10 epochs, or 1 and 9 more)."""
    whole = draws(tmp_path / "whole", 2)
    draws(tmp_path / "run", 1)
    random.seed(5)
    np.random.seed(5)
    second = draws(tmp_path / "run", 2)
    assert second == {step: whole[step] for step in range(PER_EPOCH + 1, 2 * PER_EPOCH + 1)}
    assert len({value for values in whole.values() for value in values}) == 4 * len(whole)
