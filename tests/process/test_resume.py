"""A run that is stopped, killed, moved: it goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from paceline.cluster.environment import WORKER_VARIABLE
from paceline.state.checkpoint_files import read_checkpoint
from tests.harness.equivalence.snapshot_ranks import first_difference
from tests.harness.network.ports import free_port
from tests.harness.processes.command import Command, all_end, kill, rows_of, run
from tests.harness.processes.fork_server import environment_of
from tests.harness.processes.run_folders import (
    events,
    hold,
    losses,
    release,
    wait_until,
    wait_until_step,
    write_net,
)

SMALL = (
    *("train", "--train_data", "null", "--test_data", "null", "--epoch_size", "70"),
    *("--test_epoch_size", "10", "--image_size", "32", "--augment", "none"),
    *("--num_labels", "3", "--batch_size", "6", "--run_id", "r"),
    *("--sync", "allreduce"),  # where nothing else is said: bits are compared
)
AVERAGE = "average --average_every 5 --fragments 2 --outer diloco"  # stops in mid-round
STEPS = 12  # of an epoch; the last batch is short


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_net(tmp_path)
    return tmp_path


def train(model: str, *words: str, workers: int = 2, epochs: int = 3) -> tuple[str, ...]:
    return (
        *SMALL,
        *("--model", f"net:{model}", "--num_epochs", str(epochs), "--num_workers", str(workers)),
        *words,
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody stopped."""
    return uninterrupted(tmp_path_factory.mktemp("plain"), "plain", "--keep_checkpoints", "1")


@pytest.fixture(scope="module")
def dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one with dropout, which has the checkpoints of its first and second epoch."""
    return uninterrupted(tmp_path_factory.mktemp("dropout"), "dropout", "--keep_checkpoints", "3")


def uninterrupted(folder: Path, model: str, *words: str) -> Path:
    folder.mkdir(exist_ok=True)
    write_net(folder)
    ended = run(*train(model, *words), folder=folder)
    assert ended.status == 0, ended.text
    assert len(losses(folder / "runs/r")) == 3 * STEPS
    return folder / "runs/r"


def curve(run_folder: Path) -> dict[int, float]:
    """Return the loss of each step of a run that nobody stopped."""
    return {step: told[0] for step, told in losses(run_folder).items()}


def each_sample_once(run_folder: Path, ranks: int = 2) -> None:
    """Count positions by hand: the last generation that trained a step is what counts."""
    restored = {e["generation"]: e["step"] for e in events(run_folder) if e["event"] == "restore"}
    seen: dict[int, list[int]] = {}
    for rank in range(ranks):
        for line in events(run_folder, rank):
            later = [s for g, s in restored.items() if g > line.get("generation", 0)]
            if line["event"] == "step" and all(line["step"] < start for start in later):
                seen.setdefault(line["epoch"], []).extend(range(line["first"], line["last"]))
    assert {epoch: sorted(positions) for epoch, positions in seen.items()} == {
        epoch: list(range(70)) for epoch in range(3)
    }


@pytest.fixture(scope="module")
def dropouts(dropout: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The folders of such runs, by method."""
    folder = tmp_path_factory.mktemp("notified")
    return {
        "allreduce": dropout,
        "notified": uninterrupted(folder, "dropout", "--sync", "notified"),
        AVERAGE: uninterrupted(folder / "average", "dropout", "--sync", *AVERAGE.split()),
    }


def resume_after(kills: int, words: tuple[str, ...], here: Path) -> None:
    """Kill all processes of a run at random moments, so often; then let it end."""
    moments = random.Random(20180102)
    folder = here / "runs" / "r"
    for _ in range(kills):
        before = len(events(folder))
        asked = moments.randrange(0, 6)
        hold(here, asked + 4)
        command = Command(*words, folder=here)
        wait_until(partial(started, command))
        wait_until(partial(trained, folder, before, asked))
        family = command.family()
        moments.shuffle(family)
        kill(*family)
        command.send(signal.SIGKILL)
        command.wait()
        assert all_end(family)
    release(here)
    ended = run(*words, folder=here)
    assert ended.status == 0, ended.text


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("sync", "kills"), [("allreduce", 3), ("notified", 3), (AVERAGE, 1)])
def test_kills_at_random_moments_change_no_bit(
    here: Path, dropouts: Mapping[str, Path], sync: str, kills: int
) -> None:
    words = train("dropout", "--checkpoint_steps", "2", "--sync", *sync.split())
    resume_after(kills, words, here)
    told = losses(here / "runs" / "r")
    assert {step: set(values) for step, values in told.items()} == {
        step: {loss} for step, loss in curve(dropouts[sync]).items()
    }
    each_sample_once(here / "runs" / "r")
    assert [row["epoch"] for row in rows_of(here / "runs" / "r")] == ["0", "1", "2"]
    assert rows_of(here / "runs" / "r")[-1]["cumulative_input_count"] == "210"


@pytest.mark.timeout(400)
def test_kills_change_no_bit_of_an_average_by_another_optimizer_of_mixed_samples(
    here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = (
        *("--optimizer", "lamb", "--base_learning_rate", "0.002", "--ema", "0.9"),
        *("--mixup", "0.4", "--label_smoothing", "0.1"),
    )
    plain = uninterrupted(tmp_path_factory.mktemp("options"), "dropout", *options)
    resume_after(1, train("dropout", "--checkpoint_steps", "2", *options), here)
    files = [run / "dropout_model.pt" for run in (plain, here / "runs/r")]
    assert first_difference(*(torch.load(file, weights_only=True) for file in files)) == ""
    newest = [max((run / "checkpoints").glob("step-*.pt")) for run in (plain, here / "runs/r")]
    states = [read_checkpoint(file) for file in newest]
    entries = ("model", "optimizer", "ema")
    assert first_difference(*({key: one[key] for key in entries} for one in states)) == ""


@pytest.mark.timeout(400)
def test_kills_change_no_bit_of_what_only_some_ranks_have(here: Path) -> None:
    """What a lossy wire has yet to send, and shares of the optimizer's state, on two machines."""
    moments = random.Random(20180102)
    whole = on_two_machines(here, "whole")
    assert [machine.wait().status for machine in whole] == [0, 0]
    told = here / "out0" / "run"
    for _ in range(2):
        before = len(events(told))
        asked = moments.randrange(1, 9)
        hold(here, asked + 4)
        machines = on_two_machines(here, "run")
        wait_until(partial(trained, told, before, asked), limit=150)
        killed = [process for machine in machines for process in machine.family()]
        moments.shuffle(killed)
        kill(*killed)
        for machine in machines:
            machine.send(signal.SIGKILL)
            machine.wait()
        assert all_end(killed)
    release(here)
    ended = [machine.wait() for machine in on_two_machines(here, "run")]
    assert [end.status for end in ended] == [0, 0], ended
    expected = losses(here / "out0" / "whole")
    assert len(expected) == 3 * STEPS
    assert {step: set(values) for step, values in losses(told).items()} == {
        step: set(values) for step, values in expected.items()
    }
    weights = [
        read_checkpoint(here / "out0" / name / "checkpoints" / f"step-{3 * STEPS:08}.pt")["model"]
        for name in ("whole", "run")
    ]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


def on_two_machines(here: Path, name: str) -> list[Command]:
    """Start a run of two machines of one worker each; half of `SMALL`'s batch on each."""
    meet = f"127.0.0.1:{free_port()}"
    words = train("single", "--checkpoint_steps", "2", workers=1)
    how = ("--sync", "notified", "--wire", "int8", "--update", "sharded")
    return [
        Command(
            *(*words, *how, "--num_shards", "2", "--master", meet),
            *("--run_id", name, "--batch_size", "3"),
            *("--shard_id", str(machine), "--output_dir", f"out{machine}"),
            folder=here,
        )
        for machine in (0, 1)
    ]


def started(command: Command) -> bool:
    """Return whether its two workers are there."""
    return len(command.family()) == 2


def trained(run_folder: Path, before: int, steps: int) -> bool:
    """Return whether so many steps were told after the first `before` lines."""
    return sum(line["event"] == "step" for line in events(run_folder)[before:]) >= steps


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("sync", "starts"), [("allreduce", [(2, 5), (1, 13), (3, 20)]), ("notified", [(3, 5)])]
)
def test_other_numbers_of_workers_train_the_same_curve(
    here: Path, plain: Path, sync: str, starts: list[tuple[int, int]]
) -> None:
    whole = curve(plain)
    hold(here, 8, 0.5)
    for generation, (workers, step) in enumerate(starts):
        command = Command(*train("plain", "--sync", sync, workers=workers), folder=here)
        wait_until_step(here / "runs" / "r", step, generation)
        command.send(signal.SIGTERM)
        ended = command.wait()
        assert ended.status == 143, ended.text
    release(here)
    ended = run(*train("plain", "--sync", sync, workers=4), folder=here)
    assert ended.status == 0, ended.text
    told = losses(here / "runs" / "r")
    assert set(told) == set(whole)
    for step, values in told.items():
        assert values == pytest.approx([whole[step]] * len(values), abs=1e-6)
    each_sample_once(here / "runs" / "r", ranks=4)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("number", "status", "sync"),
    [
        (signal.SIGINT, 130, "notified"),
        (signal.SIGTERM, 143, "allreduce"),
        (signal.SIGTERM, 143, AVERAGE),
    ],
)
def test_a_signal_ends_all_in_5_seconds_and_leaves_the_last_step_behind(
    here: Path, number: int, status: int, sync: str
) -> None:
    words = train("plain", "--sync", *sync.split(), epochs=100_000)
    command = Command(*words, folder=here)
    wait_until_step(here / "runs" / "r", 5, 0)
    family = command.family()
    assert len(family) == 2
    command.send(number)
    ended = command.wait(5)
    assert ended.status == status, ended.text
    assert all_end(family, limit=0)
    assert "Traceback" not in ended.text
    done = max(line["step"] for line in events(here / "runs" / "r") if line["event"] == "step")
    saved = re.findall(r"state after (\d+) steps is saved in runs/r, and the same", ended.text)
    assert saved == [str(done + 1)]
    newest = max((here / "runs" / "r" / "checkpoints").glob("step-*.pt"))
    assert read_checkpoint(newest)["position"]["number"] == done + 1


def rank_of(worker: psutil.Process) -> int:
    return int(json.loads(environment_of(worker)[WORKER_VARIABLE])["local_rank"])


def test_one_workers_signal_stops_all_at_the_same_step(here: Path) -> None:
    command = Command(*train("plain", "--sync", "notified", epochs=100_000), folder=here)
    wait_until_step(here / "runs" / "r", 5, 0)
    worker = command.family()[1]
    rank = rank_of(worker)
    worker.send_signal(signal.SIGTERM)
    ended = command.wait()
    assert ended.status == 143, ended.text
    assert (
        f"paceline: rank {rank} on machine 0 ({os.uname().nodename}): stopped by SIGTERM.\n"
        in ended.text
    )
    assert "Traceback" not in ended.text
    last = [
        [one for one in events(here / "runs" / "r", rank) if one["event"] != "cost"][-1]
        for rank in (0, 1)
    ]
    assert last[0]["event"] == "checkpoint"
    assert last[1]["event"] == "step"
    assert last[0]["step"] == last[1]["step"] + 1


def test_a_finished_run_is_not_trained_again_and_the_next_one_is(here: Path) -> None:
    words = [word for word in train("plain", workers=1, epochs=1) if word not in ("--run_id", "r")]
    for _ in range(2):
        ended = run(*words, folder=here)
        assert ended.status == 0, ended.text
    assert len(list((here / "runs").iterdir())) == 2
    name = next((here / "runs").iterdir()).name
    again = run(*words, "--run_id", name, folder=here)
    assert (again.status, again.text) == (
        0,
        f"paceline: run {name} is finished; give another --run_id to train again, or more "
        "--num_epochs.\n",
    )


def test_a_finished_run_continues_with_more_epochs_to_the_same_bits(
    here: Path, plain: Path
) -> None:
    for epochs in (2, 3):
        ended = run(*train("plain", epochs=epochs), folder=here)
        assert ended.status == 0, ended.text
    assert curve(here / "runs/r") == curve(plain)
    each_sample_once(here / "runs/r")
    name = f"step-{3 * STEPS:08}.pt"
    weights, expected = (
        read_checkpoint(folder / "checkpoints" / name)["model"]
        for folder in (here / "runs/r", plain)
    )
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_another_runs_checkpoint_is_a_start(here: Path, dropout: Path) -> None:
    file = dropout / "checkpoints" / f"step-{STEPS:08}.pt"
    ended = run(*train("dropout", "--resume", str(file)), folder=here)
    assert ended.status == 0, ended.text
    told = losses(here / "runs" / "r")
    assert {s: v[0] for s, v in told.items()} == {
        s: x for s, x in curve(dropout).items() if s >= STEPS
    }
    restore = next(e for e in events(here / "runs" / "r") if e["event"] == "restore")
    assert restore["origin"] == str(file)
    other = run(*train("dropout", "--num_labels", "4", "--resume", str(file)), folder=here)
    assert other.status == 2  # the run's configuration is another


EDITED = "--momentum 0.8 replaces the checkpoint's 0.9."


@pytest.fixture
def killed(here: Path, dropout: Path) -> Path:
    """The folder of a run that looks as if it had been killed in its third epoch."""
    folder = here / "runs/r"
    shutil.copytree(dropout, folder)
    for name in ("finished", f"checkpoints/step-{3 * STEPS:08}.pt"):
        (folder / name).unlink()
    return folder


def test_an_edited_momentum_changes_the_same_bits_by_the_runs_id_and_by_its_file(
    here: Path, killed: Path
) -> None:
    file = killed / f"checkpoints/step-{2 * STEPS:08}.pt"
    words = train("dropout", "--momentum", "0.8", "--checkpoint_steps", "1")
    words = (*words, "--keep_checkpoints", str(3 * STEPS))
    for own in ((), ("--run_id", "other", "--resume", str(file))):
        ended = run(*words, *own, folder=here)
        assert ended.status == 0, ended.text
        assert ended.text.count("replaces") == ended.text.count(EDITED) == 1
    by_id, by_file = killed, here / "runs/other"
    for step in range(2 * STEPS + 1, 3 * STEPS + 1):
        name = f"checkpoints/step-{step:08}.pt"
        one, other = (read_checkpoint(folder / name) for folder in (by_id, by_file))
        for entry in ("model", "optimizer"):
            assert first_difference(one[entry], other[entry]) == ""
    for folder in (by_id, by_file):
        said = [event["text"] for event in events(folder) if event["event"] == "note"]
        assert said.count(EDITED) == 1
    require_kept_momenta(file, by_id / f"checkpoints/step-{2 * STEPS + 1:08}.pt")


def require_kept_momenta(before: Path, after: Path) -> None:
    """Require that a step of Nesterov momentum 0.8 and rate 0.1 began with the momenta of before.

    With momenta b and gradient g: b' = 0.8 b + g, and w' = w - 0.1 (g + 0.8 b').
    """
    was, now = (read_checkpoint(path) for path in (before, after))
    groups = was["given"]["optimizers"]["optimizer"]["names"]
    for index, name in enumerate(name for group in groups for name in group):
        old, new = (state["optimizer"]["state"][index]["momentum_buffer"] for state in (was, now))
        gradient = (was["model"][name] - now["model"][name]) / 0.1 - 0.8 * new
        assert (new - (0.8 * old + gradient)).abs().max() < 1e-10


def test_an_edited_value_holds_until_it_is_edited_back(here: Path, killed: Path) -> None:
    edited = ("--momentum", "0.8")
    for own, epochs, said in (
        (edited, 3, [EDITED]),
        (edited, 4, ["--num_epochs 4 replaces the checkpoint's 3."]),
        (
            (),
            5,
            [
                "--num_epochs 5 replaces the checkpoint's 4, "
                "--momentum 0.9 replaces the checkpoint's 0.8."
            ],
        ),
    ):
        ended = run(*train("dropout", *own, epochs=epochs), folder=here)
        assert ended.status == 0, ended.text
        assert re.findall(r"--.* replaces .*\.", ended.text) == said
        known = tomllib.loads((killed / "config.toml").read_text())
        assert known["momentum"] == (0.8 if own else 0.9)


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(
    here: Path, plain: Path
) -> None:
    file = next((plain / "checkpoints").glob("step-*.pt"))
    words = [*train("plain", "--resume", str(file)), "--num_labels", "4"]
    ended = run(*words, folder=here)
    assert ended.status == 2, ended.text
    assert "body.4.weight" in ended.text
    assert "Traceback" not in ended.text


def test_a_loss_that_explodes_ends_the_run_with_a_good_checkpoint(here: Path) -> None:
    words = train("plain", "--base_learning_rate", "1e9", "--checkpoint_steps", "1")
    ended = run(*words, folder=here)
    assert ended.status == 1
    assert "The loss became" in ended.text
    assert "Use a smaller --base_learning_rate" in ended.text
    assert "Traceback" not in ended.text
    for file in (here / "runs" / "r" / "checkpoints").glob("*.pt"):
        state = torch.load(file, weights_only=True)
        assert all(torch.isfinite(value).all() for value in state["model"].values())


def test_the_best_epochs_checkpoint_is_kept(plain: Path) -> None:
    scores = [row["test_accuracy"] for row in events(plain) if row["event"] == "epoch"]
    best = read_checkpoint(plain / "checkpoints" / "best.pt")
    assert best["position"]["epoch"] == scores.index(max(scores)) + 1
    assert best["position"]["best"] == max(scores)
