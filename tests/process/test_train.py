"""The train command as a whole: real processes, real databases, real rendezvous."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from paceline.cli.main import main
from paceline.data.order import Order
from paceline.models.zoo import build_model
from paceline.observe.csv_log import COLUMNS
from tests.harness.data.image_folder import some_images
from tests.harness.network.etcd_server import etcd_server
from tests.harness.network.ports import free_port
from tests.harness.network.redis_server import redis_server
from tests.harness.processes.bad_inputs import answer, require_message
from tests.harness.processes.command import LIMIT, Command, all_end, rows_of, run
from tests.harness.processes.fork_server import ServedPopen
from tests.harness.processes.run_folders import event_files, events, wait_until, wait_until_step

SMALL = (
    *("--model", "resnet20", "--image_size", "32", "--augment", "pad", "--num_labels", "3"),
    *("--batch_size", "4", "--num_epochs", "2"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train-lmdb, train-leveldb and test-lmdb: 15, 15 and 6 images of 3 classes."""
    folder = tmp_path_factory.mktemp("data")
    some_images(folder / "train", classes=3, each=5, size=32)
    some_images(folder / "test", classes=3, each=2, size=32)
    for part, kind in (("train", "lmdb"), ("train", "leveldb"), ("test", "lmdb")):
        made = run("db", "create", part, f"{part}-{kind}", "--db_type", kind, folder=folder)
        assert made.status == 0, made.text
    return folder


def train(data: Path, *words: str) -> tuple[str, ...]:
    return ("train", "--train_data", str(data / "train-lmdb"), *SMALL, *words)


def test_two_workers_leave_log_events_weights_and_configuration(data: Path, tmp_path: Path) -> None:
    words = train(data, "--test_data", str(data / "test-lmdb"), "--num_workers", "2")
    ended = run(*words, "--run_id", "r", folder=tmp_path, real=True)
    assert ended.status == 0, ended.text
    assert "epoch 2/2" in ended.text

    rows = rows_of(tmp_path / "runs" / "r")
    assert list(rows[0]) == list(COLUMNS)
    assert [row["cumulative_input_count"] for row in rows] == ["15", "30"]
    assert [row["cumulative_batch_count"] for row in rows] == ["4", "8"]
    assert all(0 <= float(row["test_accuracy"]) <= 1 for row in rows)
    (log,) = (tmp_path / "runs" / "r").glob("resnet20_gpu2_b4_L3_lr0.10_v2_*.log")
    assert log.read_text().startswith("# ")

    state = torch.load(tmp_path / "runs" / "r" / "resnet20_model.pt", weights_only=True)
    build_model("resnet20", num_labels=3, num_channels=3).load_state_dict(state)
    kept = torch.load(tmp_path / "runs" / "r" / "resnet20_best.pt", weights_only=True)
    best = torch.load(tmp_path / "runs" / "r" / "checkpoints" / "best.pt", weights_only=True)
    assert all(torch.equal(value, kept[name]) for name, value in best["model"].items())
    assert (tmp_path / "runs" / "r" / "labels.txt").read_text().split() == [
        "class0",
        "class1",
        "class2",
    ]
    card = (tmp_path / "runs" / "r" / "README.md").read_text()
    scores = [float(row["test_accuracy"]) for row in rows]
    assert f"| test accuracy | {max(scores):.2%}, the best |" in card
    assert "| classes | class0, class1, class2 |" in card
    assert "paceline predict runs/r IMAGE_OR_FOLDER" in card
    (loads,) = re.findall("```python\n(.*?)```", card, re.DOTALL)
    exec(loads.replace("resnet20_best.pt", str(tmp_path / "runs/r/resnet20_best.pt")), {})
    said = f"best test accuracy {max(scores):.2%} after epoch {scores.index(max(scores)) + 1}"
    assert said in ended.text
    assert "Weights: runs/r/resnet20_model.pt, runs/r/resnet20_best.pt" in ended.text

    with (data / "evaluated.json").open("w") as file, redirect_stdout(file):
        words = ("--test_data", str(data / "test-lmdb"), "--weights", "last", "--use_cpu", "--json")
        assert main(["evaluate", str(tmp_path / "runs/r"), *words]) == 0
    evaluated = json.loads((data / "evaluated.json").read_text())
    (own,) = [
        one for one in events(tmp_path / "runs/r") if one["event"] == "epoch" and one["epoch"] == 1
    ]
    assert (evaluated["accuracy"], evaluated["top5"]) == (own["test_accuracy"], own["top5"])

    status = run("status", "r", folder=tmp_path)
    assert status.status == 0
    assert f"is finished, after 8 steps in generation 0; {said}; weights: " in status.text


def test_ctrl_z_stops_the_workers_with_their_supervisor_and_is_no_silence(
    data: Path, tmp_path: Path
) -> None:
    """Longer than all limits on a peer's silence: steps are made again, and no worker is lost."""
    limits = ("--timeout", "2", "--peer_timeout", "2", "--sync", "notified")
    words = train(data, "--num_workers", "2", "--num_epochs", "1000", "--run_id", "r", *limits)
    folder = tmp_path / "runs" / "r"
    # A process group of its own, which a shell could continue: the kernel stops no other.
    with ServedPopen(
        [sys.executable, "-m", "paceline.cli.main", *words],
        cwd=tmp_path,
        process_group=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        wait_until_step(folder, 3, 0)
        family = [psutil.Process(process.pid)]
        family += family[0].children()  # their decode processes wait when the queue is full
        for _ in range(2):
            process.send_signal(signal.SIGTSTP)
            wait_until(lambda: all(is_stopped(one) for one in family), 20)
            threading.Event().wait(4)
            assert all(map(is_stopped, family))
            before = len(steps_of(folder))
            process.send_signal(signal.SIGCONT)
            wait_until(lambda before=before: len(steps_of(folder)) > before + 10)  # type: ignore[misc]
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGINT, text
    changes = [event for event in events(folder, 0) if event["event"] == "change"]
    assert all(not one["lost"] and len(one["members"]) == 2 for one in changes)  # steps again


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in events(folder, 0) if event["event"] == "step"]


def is_stopped(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_STOPPED)


def shares(run_folder: Path) -> dict[tuple[int, int], list[int]]:
    """Read which positions of the order each step of each epoch trained, on all ranks."""
    seen: dict[tuple[int, int], list[int]] = {}
    for file in sorted(run_folder.glob("events.*.jsonl")):
        for event in map(json.loads, file.read_text().splitlines()):
            if event["event"] == "step":
                positions = seen.setdefault((event["epoch"], event["step"]), [])
                positions += range(event["first"], event["last"])
    return seen


def test_the_ranks_events_account_for_each_sample_once(data: Path, tmp_path: Path) -> None:
    ended = run(*train(data, "--num_workers", "3", "--run_id", "r"), folder=tmp_path)
    assert ended.status == 0, ended.text
    seen = shares(tmp_path / "runs" / "r")
    order = Order(size=15, batch_size=4)
    for (epoch, step), positions in seen.items():
        batch = order.place(epoch, step - epoch * order.steps, 0, 1)
        assert sorted(positions) == list(range(batch.first, batch.last))
    assert len(seen) == 2 * order.steps


def test_a_leveldb_trains_as_the_lmdb_does(data: Path, tmp_path: Path) -> None:
    rows = []
    for kind in ("lmdb", "leveldb"):
        words = ("train", "--train_data", str(data / f"train-{kind}"), "--db_type", kind, *SMALL)
        words += ("--sync", "notified")  # the same for both: bits are compared
        ended = run(*words, "--num_workers", "2", "--run_id", kind, folder=tmp_path)
        assert ended.status == 0, ended.text
        rows.append([(r["loss"], r["accuracy"]) for r in rows_of(tmp_path / "runs" / kind)])
    assert rows[0] == rows[1]


@contextmanager
def rendezvous_flags(kind: str, folder: Path) -> Iterator[list[str]]:
    if kind == "folder":
        (folder / "meet").mkdir()
        yield ["--file_store_path", str(folder / "meet")]
    elif kind == "tcp":
        yield ["--master", f"127.0.0.1:{free_port()}"]
    elif kind == "etcd":
        with etcd_server(folder) as endpoint:
            yield ["--etcd", f"127.0.0.1:{free_port()},{endpoint}"]
    else:
        with redis_server("pass") as url:
            yield ["--redis_url", url]


@pytest.mark.parametrize("kind", ["folder", "redis", "etcd", "tcp"])
def test_two_machines_of_two_workers_are_one_run(data: Path, tmp_path: Path, kind: str) -> None:
    with rendezvous_flags(kind, tmp_path) as meet:
        words = train(data, "--num_gpus", "2", "--num_shards", "2", "--run_id", "r", *meet)
        machines = [
            Command(*words, "--shard_id", str(i), "--output_dir", f"out{i}", folder=tmp_path)
            for i in (0, 1)
        ]
        first, second = (machine.wait() for machine in machines)
    assert first.status == second.status == 0, first.text + second.text
    assert "2 CPU workers instead" in first.text
    assert "Training on machine 1 (resnet20, 2 epochs); machine 0 shows the steps." in second.text
    assert "epoch 2/2: loss " in second.text
    assert "machine 0 shows the steps" not in first.text
    assert "4 workers on 2 machines" in first.text

    rows = rows_of(tmp_path / "out0" / "r")
    assert [row["test_accuracy"] for row in rows] == ["-1", "-1"]
    assert [row["input_count"] for row in rows] == ["15", "15"]
    assert rows[0]["cumulative_batch_count"] == "2"  # 8 images a step on all machines
    names = sorted(path.name for path in (tmp_path / "out1" / "r").iterdir())
    files = [path.name for rank in (2, 3) for path in event_files(tmp_path / "out1" / "r", rank)]
    assert names == ["config.toml", *files, "finished", "generation", "lineage.json"]
    assert [name[-8:] for name in files] == ["-2.jsonl", "-3.jsonl"]
    files = [path for path in (tmp_path / "out0" / "r").rglob("*") if path.is_file()]
    assert len(files) > 4
    for file in files:
        assert b":pass@" not in file.read_bytes()


def test_a_machine_without_its_mark_hears_of_machine_0_that_the_run_is_finished(
    data: Path, tmp_path: Path
) -> None:
    with rendezvous_flags("tcp", tmp_path) as meet:
        words = train(data, "--num_epochs", "1", "--num_shards", "2", "--run_id", "r", *meet)
        for _ in range(2):
            machines = [
                Command(*words, "--shard_id", str(i), "--output_dir", f"out{i}", folder=tmp_path)
                for i in (0, 1)
            ]
            ends = [machine.wait() for machine in machines]
            assert [end.status for end in ends] == [0, 0], ends
            (tmp_path / "out1/r/finished").unlink()  # as if it had been killed before
    for end in ends:
        assert end.text.splitlines()[-1] == (
            "paceline: run r is finished; give another --run_id to train again, or more "
            "--num_epochs."
        )


ENDLESS = ("--num_epochs", "100000", "--num_workers", "2", "--run_id", "r")


def test_a_killed_worker_is_named_and_a_stop_leaves_nothing(data: Path, tmp_path: Path) -> None:
    command = Command(*train(data, *ENDLESS), folder=tmp_path)
    command.line_with("epoch 2/")
    family = command.family()
    family[1].kill()
    # The survivor's line comes first where the supervisor doesn't run for 0.2 s.
    named, _ = command.lines_with(
        "The others decide how the run continues.", "1 process continues from step"
    )
    assert "rank 1 on machine 0" in named
    assert "was killed by SIGKILL" in named
    command.send(signal.SIGINT)
    ended = command.wait()
    assert ended.status == 130
    assert "was killed" not in ended.text
    assert "Traceback" not in ended.text
    assert all_end(family)


def test_a_live_run_is_refused_a_second_start(
    data: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = Command(*train(data, *ENDLESS), folder=tmp_path)
    command.line_with("epoch 2/")
    monkeypatch.chdir(tmp_path)
    said = (
        rf"--run_id r: this run is active on this machine \(process {command.pid} on .*\); "
        "end it with `paceline stop runs/r`, or give another --run_id."
    )
    require_message(answer(shlex.join(train(data, *ENDLESS)), capfd), 2, said)
    command.send(signal.SIGINT)
    assert command.wait().status == 130
