"""Options of optimisation: equal to one process, and the same bits after a rollback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.equivalence.large_batch import largest_difference
from tests.harness.equivalence.trainer_breaks import drawn
from tests.harness.equivalence.trainer_rollbacks import FLOAT64, TrainerRollbacks
from tests.harness.equivalence.undisturbed_runs import undisturbed

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
    "smoothing": ("--label_smoothing", "0.2", "--sync", "notified"),
}


@pytest.mark.parametrize("name", CASES)
def test_three_workers_train_as_one_process_and_the_same_bits_after_they_went_back(
    name: str, tmp_path: Path
) -> None:
    flags = (*CASES[name], *FLOAT64, "--bucket_mb", "0.01")
    (alone,) = undisturbed((*CASES[name], *FLOAT64), (1,)).states
    plain = undisturbed(flags, (2, 1)).states
    assert largest_difference(plain[0], alone) < 1e-10
    assert largest_difference(plain[0], undisturbed(FLOAT64, (1,)).states[0]) > 1e-4  # it matters
    broken = TrainerRollbacks(tmp_path / "broken", flags, (2, 1), drawn(3, [2, 5], 3)).run()
    for one, other in zip(plain, broken, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
