"""The trainer goes back to a snapshot in the same processes, whenever its generation ends."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from paceline.cli import ledger
from paceline.run import share_rule, worker_speeds
from paceline.run.autotune import autotuner, trials
from paceline.state.checkpoint_files import read_checkpoint
from paceline.state.exchange_choice import CHOICE_NAME
from tests.harness.equivalence.large_batch import largest_difference
from tests.harness.equivalence.snapshot_ranks import first_difference
from tests.harness.equivalence.trainer_breaks import ANY, Moment, drawn
from tests.harness.equivalence.trainer_rollbacks import (
    EPOCHS,
    FLOAT32,
    FLOAT64,
    SAMPLES,
    STEPS,
    TrainerRollbacks,
)
from tests.harness.equivalence.undisturbed_runs import Undisturbed, undisturbed
from tests.harness.processes.run_folders import event_files, events

CASES = {
    "average": ("--sync", "average", "--average_every", "2", "--bucket_mb", "0.1"),
    "allreduce": ("--sync", "allreduce"),
    "notified": ("--sync", "notified", "--bucket_mb", "0.1"),
    "sharded": ("--sync", "notified", "--update", "sharded", "--bucket_mb", "0.1"),
    "int8": ("--sync", "notified", "--wire", "int8", "--bucket_mb", "0.1"),
    "sharded int8": (
        *("--sync", "notified", "--update", "sharded", "--wire", "int8"),
        *("--bucket_mb", "0.1"),
    ),
    "sync_bn": ("--sync", "notified", "--sync_bn", "--bucket_mb", "0.1"),
    "loss scaling": ("--sync", "allreduce", "--dtype", "float16"),
    "clipping": ("--sync", "notified", "--clip_norm", "1"),
}
WAITS = (-2, "")  # for a peer that breaks off
RECOVERING = [(ANY, "entering"), (ANY, "entered"), (ANY, "entered")]
SCORES = ("accuracy", "loss", "test_accuracy")
DROPPED = "The error-feedback residuals are dropped: no lossy wire is used any more."
TIMES = ("time_spent", "cumulative_time_spent", "inputs_per_sec")


def check(
    folder: Path,
    flags: tuple[str, ...],
    moments: list[list[Moment]],
    machines: tuple[int, ...] = (2, 1),
    plain: Undisturbed | None = None,
) -> TrainerRollbacks:
    """Train without and with breaks; compare all bits and the log."""
    plain = plain or undisturbed(flags, machines)
    broken = TrainerRollbacks(folder / "broken", flags, machines, moments)
    for one, other in zip(plain.states, broken.run(), strict=True):
        assert one.keys() == other.keys()
        unlike = [key for key in one if not torch.equal(one[key], other[key])]
        assert not unlike, moments
    assert len(broken.starts) == len(moments)
    for one, other in zip(plain.rows, broken.rows, strict=True):
        assert {k: v for k, v in one.items() if k not in TIMES} == {
            k: v for k, v in other.items() if k not in TIMES
        }
    return broken


@pytest.mark.parametrize("name", CASES)
def test_a_trainer_whose_generations_end_in_mid_step_trains_the_same_bits(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = check(tmp_path, CASES[name], drawn(3, [1, 3, 5], 3))
    capsys.readouterr()
    assert ledger.main([str(broken.folder), "--json"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert [one["once"] for one in proof["accounts"]] == [SAMPLES] * EPOCHS
    assert [one["start"] for one in proof["generations"]] == [0, *broken.starts]
    assert all(one["in_lineage"] for one in proof["generations"])
    lines, started = events(broken.folder), -1
    for line in lines:
        started += line["event"] == "run"
        decided = line["event"] == "change"  # on the generation to come
        assert line.get("generation", started + decided) == started + decided
    assert {line["generation"] for line in lines if line["event"] == "loss"} >= {1, 3}


@pytest.mark.parametrize("name", ["allreduce", "sharded"])
def test_checkpoints_are_those_of_an_undisturbed_run(name: str, tmp_path: Path) -> None:
    flags = (*CASES[name], "--checkpoint_steps", "3", "--keep_checkpoints", "9")
    moments = [[(3, "end")] * 3, [(4, "load"), (4, "update"), (4, "backward")]]
    plain = TrainerRollbacks(tmp_path / "plain", flags, (2, 1))
    broken = check(tmp_path, flags, moments, plain=Undisturbed(plain.run(), plain.rows))
    found = [{file.name: file for file in files_of(tmp_path / run)} for run in ("plain", "broken")]
    assert sorted(found[0]) == [f"step-{step:08}.pt" for step in (3, 4, 6, 8)]
    assert found[0].keys() == found[1].keys()
    assert 3 in broken.starts
    lineage = read_checkpoint(found[1]["step-00000008.pt"])["lineage"]
    assert [start for _, start in lineage] == [0, *broken.starts]
    for file in found[0]:
        one, other = (read_checkpoint(files[file]) for files in found)
        for state in (one, other):
            del state["position"]["generation"], state["position"]["snapshot_interval"]
            del state["position"]["usage"]
        parts = ("model", "optimizer", "schedule", "position")
        assert first_difference(*({part: of[part] for part in parts} for of in (one, other))) == ""


def files_of(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("step-*.pt"))


@pytest.mark.parametrize(
    ("name", "parked"),
    [
        *(
            pytest.param(name, [(1,), ()], id=f"{name}, fewer and back")
            for name in ("allreduce", "notified", "sharded", "clipping", "int8", "sharded int8")
        ),
        # To the end: what replicas have, and what each rank alone has.
        *(pytest.param(name, [(1,)], id=f"{name}, fewer") for name in ("notified", "sharded int8")),
    ],
)
def test_a_trainer_continues_with_fewer_members_and_with_all_again(
    name: str, parked: list[tuple[int, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lossy = "int8" in name
    machines = (1, 1, 1) if lossy or "sharded" in name else (2, 1)  # each rank has its own part
    flags = (*CASES[name], *(FLOAT32 if lossy else FLOAT64))
    plain = undisturbed(flags, machines)
    moments = [*drawn(4, [2], 3), [(7, "load"), (7, "update"), (7, "backward")]][: len(parked)]
    other = TrainerRollbacks(tmp_path / "other", flags, machines, moments, parked)
    states = other.run()
    present = [state for rank, state in enumerate(states) if rank not in parked[-1]]
    for state in present:
        assert all(torch.equal(state[key], value) for key, value in present[0].items())
    assert largest_difference(present[0], plain.states[0]) < (1e-3 if lossy else 1e-10)
    assert all(start % STEPS for start in other.starts), (
        other.starts
    )  # sums of the epoch were under way
    assert other.handed_over == [[], [1]][: len(parked)]
    for one, row in zip(plain.rows, other.rows, strict=True):
        for key in ("input_count", "cumulative_input_count", *(() if lossy else SCORES)):
            assert float(row[key]) == pytest.approx(float(one[key]), rel=1e-7)
    for lost in ([], event_files(other.folder, rank=1)):  # of the member that leaves
        for path in lost:
            path.unlink()
        capsys.readouterr()
        assert ledger.main([str(other.folder), "--json"]) == 0
        proof = json.loads(capsys.readouterr().out)
        assert [one["once"] for one in proof["accounts"]] == [SAMPLES] * EPOCHS
        assert any(one["substituted"] for one in proof["accounts"]) == bool(lost)


@pytest.mark.parametrize(
    ("name", "parked"),
    [("sharded", [(1,), ()])],
    ids=["fewer and back"],
)
def test_a_trainer_whose_shares_change_as_often_as_they_can_is_exact_after_rollbacks(
    name: str,
    parked: list[tuple[int, ...]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_speeds, "UNTIMED", 0)
    monkeypatch.setattr(share_rule, "WINDOWS", ((1, 0.0),))
    monkeypatch.setattr(share_rule, "LEAST_GAIN", -math.inf)
    epochs, flags = 8, (*CASES[name], *FLOAT64, "--num_epochs", "8")
    plain = TrainerRollbacks(tmp_path / "plain", flags, (1, 1, 1))
    moments = drawn(5, [9, 17], 3)
    measured = (*flags, "--shares", "measured")
    other = TrainerRollbacks(tmp_path / "other", measured, (1, 1, 1), moments, parked)
    (expected, *_), states = plain.run(), other.run()
    for state in states:
        assert largest_difference(state, expected) < 1e-10
        assert largest_difference(state, states[0]) == 0
    steps = [line for line in events(other.folder) if line["event"] == "step"]
    cuts = [[one - line["cuts"][0] for one in line["cuts"]] for line in steps]
    assert len({tuple(one) for one in cuts if one[-1] == 12}) > 1
    capsys.readouterr()
    assert ledger.main([str(other.folder), "--json"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert [one["once"] for one in proof["accounts"]] == [SAMPLES] * epochs


@pytest.mark.parametrize(("left", "notes"), [(2, []), (1, [DROPPED])], ids=["two ranks", "one"])
def test_residuals_are_dropped_where_no_lossy_wire_is_used_any_more(
    left: int, notes: list[str], tmp_path: Path
) -> None:
    parked = [tuple(range(left, 3))]
    flags, moments = (*CASES["int8"], *FLOAT32), [[(3, "end")] * 3]
    TrainerRollbacks(tmp_path / "run", flags, (1, 1, 1), moments, parked).run()
    texts = [line["text"] for line in events(tmp_path / "run") if line["event"] == "note"]
    assert [text for text in texts if "error-feedback residuals" in text] == notes


@pytest.mark.parametrize(
    ("moments", "name"),
    [
        ([[(STEPS - 1, "end")] * 3], "notified"),
        ([[(STEPS, "evaluation")] * 3], "notified"),
        ([[(STEPS, "evaluation"), WAITS, WAITS], [WAITS, (STEPS, "gathering"), WAITS]], "sharded"),
        ([[(STEPS, "load"), (STEPS, "forward"), (STEPS, "update")]], "notified"),
        ([[(2, "update")] * 3, [(3, "load")] * 3, [(3, "load")] * 3], "notified"),
        ([[(5, "update")] * 3, RECOVERING, RECOVERING[::-1]], "notified"),
    ],
    ids=[
        "the last step of an epoch",
        "an evaluation",
        "an evaluation's total and a checkpoint",
        "an epoch's first step",
        "again and again",
        "the recovery",
    ],
)
def test_a_generation_may_end_around_an_epochs_end(
    moments: list[list[Moment]], name: str, tmp_path: Path
) -> None:
    check(tmp_path, CASES[name], moments)


def test_a_generation_may_end_in_the_trials_of_autotuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SKIPPED": 0, "COUNTED": 1}.items():
        monkeypatch.setattr(trials, name, value)
    for name, value in {"MIN_RUN_STEPS_PER_TRIAL_STEP": 0, "UNTIMED": 1, "TIMED": 2}.items():
        monkeypatch.setattr(autotuner, name, value)
    moments = drawn(5, [1, 3, 17], 2)
    broken = check(tmp_path, ("--sync", "auto", "--num_epochs", "5"), moments, machines=(1, 1))
    assert (broken.folder / CHOICE_NAME).exists()
