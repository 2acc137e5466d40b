"""Options of optimisation: equal to one process, and the same bits after a rollback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.state.checkpoint_files import read_checkpoint
from tests.harness.equivalence.large_batch import largest_difference
from tests.harness.equivalence.trainer_breaks import drawn
from tests.harness.equivalence.trainer_rollbacks import (
    EPOCHS,
    FLOAT64,
    STEPS,
    ToFloat64,
    TrainerRollbacks,
)
from tests.harness.equivalence.undisturbed_runs import undisturbed
from tests.harness.processes.run_folders import events

NORMED = ("--model", f"{__name__}:normed")
RATE = ("--base_learning_rate", "0.002")
CASES = {
    "adamw": (
        *("--optimizer", "adamw", "--optimizer_options", "betas=(0.8, 0.95) eps=1e-6", *RATE),
        *("--weight_decay", "0.1", "--sync", "notified", "--update", "sharded"),
    ),
    "lamb": ("--optimizer", "lamb", *RATE, "--sync", "notified"),
    "lars": (
        *("--optimizer", "lars", "--optimizer_options", "trust_coefficient=0.02"),
        *("--lr_policy", "cosine", "--warmup_epochs", "1", "--sync", "allreduce"),
    ),
    "freeze": ("--freeze", "*.0.*", "*.1.*", "--sync", "notified"),
    "ema": ("--ema", "0.8", "--sync", "notified", "--update", "sharded"),
    "mixup": ("--mixup", "0.4", "--label_smoothing", "0.1", "--sync", "notified"),
    "smoothing": ("--label_smoothing", "0.2", "--sync", "notified"),
}


def normed(num_labels: int) -> nn.Module:
    """Make a net with BatchNorm, which no batch changes while it is frozen."""
    first = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Tanh()]
    last = [nn.Flatten(), nn.Linear(8 * 7 * 7, 16), nn.Tanh(), nn.Linear(16, num_labels)]
    net = nn.Sequential(*first, *last).double()
    net[1].running_mean += 0.3  # as in a trained one
    return nn.Sequential(ToFloat64(), net)


@pytest.mark.parametrize("name", CASES)
def test_three_workers_train_as_one_process_and_the_same_bits_after_they_went_back(
    name: str, tmp_path: Path
) -> None:
    model = NORMED if name == "freeze" else FLOAT64
    flags = (*CASES[name], *model)
    (alone,) = undisturbed(flags, (1,)).states
    plain = undisturbed(flags, (2, 1)).states
    assert largest_difference(plain[0], alone) < 1e-10
    assert largest_difference(alone, undisturbed(model, (1,)).states[0]) > 1e-4  # it matters
    broken = TrainerRollbacks(tmp_path / "broken", flags, (2, 1), drawn(3, [2, 5], 3)).run()
    for one, other in zip(plain, broken, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_what_is_frozen_stays_and_all_else_is_trained(tmp_path: Path) -> None:
    training = TrainerRollbacks(tmp_path / "run", (*CASES["freeze"], *NORMED), (1, 1))
    states = training.run()
    start = torch.load(training.folder / "start.pt", weights_only=True)
    for state in states:
        same = [key for key, value in state.items() if torch.equal(value, start[key])]
        assert same == [key for key in start if key.startswith(("1.0.", "1.1."))]
        assert len(same) == 7  # running statistics among them


def test_the_average_of_the_weights_is_what_is_written(tmp_path: Path) -> None:
    kept = ("--checkpoint_steps", "1", "--keep_checkpoints", "99")
    training = TrainerRollbacks(tmp_path / "run", (*CASES["ema"], *NORMED, *kept), (1, 1))
    training.run()
    files = sorted((training.folder / "checkpoints").glob("step-*.pt"))
    steps = [read_checkpoint(path)["model"] for path in files]
    assert len(steps) == STEPS * EPOCHS
    expected = dict(steps[0])
    for state in steps[1:]:
        for name in expected:
            buffer = "running" in name or "tracked" in name
            expected[name] = state[name] if buffer else 0.8 * expected[name] + 0.2 * state[name]
    written = torch.load(training.folder / "normed_model.pt", weights_only=True)
    assert largest_difference(written, expected) < 1e-14
    assert largest_difference(written, steps[-1]) > 1e-3


def test_the_average_of_the_weights_is_what_is_evaluated(tmp_path: Path) -> None:
    flags = ("--ema", "0.999999", *FLOAT64)  # which the first step's weights stay
    TrainerRollbacks(tmp_path / "run", flags, (1,)).run()
    first, last = [event for event in events(tmp_path / "run") if event["event"] == "epoch"]
    assert first["test_loss"] == pytest.approx(last["test_loss"], rel=1e-4)
    assert first["loss"] - last["loss"] > 0.05


def test_mixed_samples_are_scored_by_the_image_that_has_the_larger_weight(tmp_path: Path) -> None:
    TrainerRollbacks(tmp_path / "run", (*CASES["mixup"], *FLOAT64), (1,)).run()
    accuracies = [
        event["accuracy"] for event in events(tmp_path / "run") if event["event"] == "epoch"
    ]
    assert accuracies[-1] >= 0.1  # by both labels and the weight, as they are packed, none is right
