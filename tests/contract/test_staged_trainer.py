"""The trainer with `--stages` equals that of whole replicas which train the same microbatches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.harness.equivalence.trainer_rollbacks import ToFloat64, TrainerRollbacks, single
from tests.harness.processes.fault_runs import EXACT, distance, load
from tests.harness.processes.run_folders import events

SCORES = ("accuracy", "loss", "test_accuracy", "cumulative_input_count")
MICROBATCHES = ("--model", f"{__name__}:normed", "--microbatches", "3", "--clip_norm", "1")
PLAIN = ("--model", f"{__name__}:plain")


def normed(num_labels: int) -> nn.Module:
    """Make a net with batch statistics, of which each block but the first has parameters."""
    torch.manual_seed(2)
    return nn.Sequential(
        ToFloat64(),
        nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Tanh()),
        nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.BatchNorm2d(6), nn.Flatten()),
        nn.Linear(6 * 9, num_labels),
    ).double()


def plain(num_labels: int) -> nn.Module:
    """Make a net that knows no batch, so that microbatches change nothing."""
    torch.manual_seed(2)
    return nn.Sequential(ToFloat64(), nn.Flatten(), nn.Linear(3 * 16**2, num_labels)).double()


def train(folder: Path, machines: tuple[int, ...], *flags: str) -> TrainerRollbacks:
    training = TrainerRollbacks(folder, (*MICROBATCHES, *flags), machines)
    training.run()
    return training


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, TrainerRollbacks]:
    """Trainings of one and of two whole replicas."""
    folder = tmp_path_factory.mktemp("whole")
    return {n: train(folder / f"{n}", (n,), "--sync", "allreduce") for n in (1, 2)}


def require_same_scores(training: TrainerRollbacks, expected: TrainerRollbacks) -> None:
    for rows in zip(training.rows, expected.rows, strict=True):
        for name in SCORES:
            value, other = (float(row[name]) for row in rows)
            assert value == pytest.approx(other, rel=1e-6), name


def test_microbatches_of_a_model_that_knows_no_batch_change_nothing(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", (1,), *PLAIN, "--microbatches", "0")
    cut = train(tmp_path / "cut", (1,), *PLAIN)
    assert distance(*(load(one.folder / "plain_model.pt") for one in (cut, whole))) < EXACT
    require_same_scores(cut, whole)


@pytest.mark.parametrize(
    ("replicas", "flags"),
    [
        (1, ("--stages", "2", "--cuts", "2.0", "--schedule", "gpipe")),
        (1, ("--stages", "3", "--cuts", "1.1,2.1", "--schedule", "zb-h1")),
        (2, ("--stages", "2", "--sync", "allreduce", "--checkpoint_activations")),
        (2, ("--stages", "2", "--cuts", "3", "--sync", "notified", "--bucket_mb", "0.1")),
    ],
)
def test_stages_train_as_whole_replicas_do(
    replicas: int,
    flags: tuple[str, ...],
    alone: dict[int, TrainerRollbacks],
    tmp_path: Path,
) -> None:
    whole = alone[replicas]
    staged = train(tmp_path / "r", (int(flags[1]) * replicas,), *flags)
    weights = [load(one.folder / "normed_model.pt") for one in (staged, whole)]
    assert [*weights[0]] == [*weights[1]]  # in the model's order
    assert distance(*weights) < EXACT
    require_same_scores(staged, whole)
    chosen = [e["text"] for e in events(staged.folder, 0) if "Pin this choice" in e.get("text", "")]
    assert len(chosen) == ("--cuts" not in flags)


def test_stages_compute_in_bfloat16_as_a_whole_replica_does(tmp_path: Path) -> None:
    flags = ("--model", f"{single.__module__}:single", "--dtype", "bfloat16", "--force_bfloat16")
    whole = train(tmp_path / "whole", (1,), *flags)
    exact = train(tmp_path / "exact", (1,), "--model", f"{single.__module__}:single")
    staged = train(tmp_path / "cut", (2,), *flags, "--stages", "2", "--cuts", "3")
    weights = [load(one.folder / "single_model.pt") for one in (whole, staged, exact)]
    assert all(value.dtype is torch.float32 for value in weights[1].values())
    assert distance(*weights[:2]) < 1e-6 < distance(*weights[::2])
    require_same_scores(staged, whole)
