"""Options of optimisation: equal to one process, and the same bits after a rollback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.harness.equivalence.large_batch import largest_difference
from tests.harness.equivalence.trainer_breaks import drawn
from tests.harness.equivalence.trainer_rollbacks import FLOAT64, ToFloat64, TrainerRollbacks
from tests.harness.equivalence.undisturbed_runs import undisturbed

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
