"""The train command as a whole: real processes, real databases, real meeting places."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import lmdb
import pytest
import torch

from paceline.data.order import Order
from paceline.models.zoo import build_model
from paceline.observe.csv_log import COLUMNS
from tests.harness.command import Command, Ended, gone, rows_of, run
from tests.harness.image_folder import some_images
from tests.harness.ports import free_port
from tests.harness.redis import redis_server

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
    ended = run(*words, "--run_id", "r", folder=tmp_path)
    assert ended.status == 0, ended.text
    assert "epoch 2/2" in ended.text

    rows = rows_of(tmp_path / "runs" / "r")
    assert tuple(rows[0]) == COLUMNS
    assert [row["cumulative_input_count"] for row in rows] == ["15", "30"]
    assert [row["cumulative_batch_count"] for row in rows] == ["4", "8"]
    assert all(0 <= float(row["test_accuracy"]) <= 1 for row in rows)
    (log,) = (tmp_path / "runs" / "r").glob("resnet20_gpu2_b4_L3_lr0.10_v2_*.log")
    assert log.read_text().startswith("# ")

    state = torch.load(tmp_path / "runs" / "r" / "resnet20_model.pt", weights_only=True)
    build_model("resnet20", num_labels=3, num_channels=3).load_state_dict(state)


def shares(run_folder: Path) -> dict[tuple[int, int], list[int]]:
    """Read which positions of the order each step of each epoch trained, on all ranks."""
    seen: dict[tuple[int, int], list[int]] = {}
    for file in sorted(run_folder.glob("events.rank*.jsonl")):
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
        first, last = order.batch_range(step - epoch * order.steps)
        assert sorted(positions) == list(range(first, last))
    assert len(seen) == 2 * order.steps


def test_a_leveldb_trains_as_the_lmdb_does(data: Path, tmp_path: Path) -> None:
    rows = []
    for kind in ("lmdb", "leveldb"):
        words = ("train", "--train_data", str(data / f"train-{kind}"), "--db_type", kind, *SMALL)
        ended = run(*words, "--num_workers", "2", "--run_id", kind, folder=tmp_path)
        assert ended.status == 0, ended.text
        rows.append([(r["loss"], r["accuracy"]) for r in rows_of(tmp_path / "runs" / kind)])
    assert rows[0] == rows[1]


@contextmanager
def meeting_place(kind: str, folder: Path) -> Iterator[list[str]]:
    if kind == "folder":
        (folder / "meet").mkdir()
        yield ["--file_store_path", str(folder / "meet")]
    elif kind == "tcp":
        yield ["--master", f"127.0.0.1:{free_port()}"]
    else:
        with redis_server("pass" if kind == "redis with password" else "") as url:
            place = urlsplit(url)
            if place.password:
                yield ["--redis_url", url]
            else:
                yield ["--redis_host", str(place.hostname), "--redis_port", str(place.port)]


@pytest.mark.parametrize("kind", ["folder", "redis", "redis with password", "tcp"])
def test_two_machines_of_two_workers_are_one_run(data: Path, tmp_path: Path, kind: str) -> None:
    with meeting_place(kind, tmp_path) as meet:
        words = train(data, "--num_gpus", "2", "--num_shards", "2", "--run_id", "r", *meet)
        machines = [
            Command(*words, "--shard_id", str(i), "--output_dir", f"out{i}", folder=tmp_path)
            for i in (0, 1)
        ]
        first, second = (machine.wait() for machine in machines)
    assert first.status == second.status == 0, first.text + second.text
    assert "2 CPU workers instead" in first.text
    assert "4 workers on 2 machines" in first.text

    rows = rows_of(tmp_path / "out0" / "r")
    assert [row["test_accuracy"] for row in rows] == ["-1", "-1"]
    assert [row["input_count"] for row in rows] == ["15", "15"]
    assert rows[0]["cumulative_batch_count"] == "2"  # 8 images a step on all machines
    names = sorted(path.name for path in (tmp_path / "out1" / "r").iterdir())
    assert names == ["config.toml", "events.rank2.jsonl", "events.rank3.jsonl", "finished"]
    files = [path for path in (tmp_path / "out0" / "r").rglob("*") if path.is_file()]
    assert len(files) > 4
    for file in files:
        assert b":pass@" not in file.read_bytes()


def test_a_machine_without_its_mark_hears_of_machine_0_that_the_run_is_finished(
    data: Path, tmp_path: Path
) -> None:
    with meeting_place("tcp", tmp_path) as meet:
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
            "paceline: run r is finished; give another --run_id to train again."
        )


def refused(ended: Ended, *told: str) -> None:
    assert ended.status == 2, ended.text
    text = " ".join(ended.text.replace("│", " ").split())
    assert "Traceback" not in text
    for words in told:
        assert words in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--test_data", "missing"], "--test_data missing: there is no such database"),
        (["--num_labels", "2"], "--num_labels 2: "),
        (["--num_workers", "16"], "15 samples for 16 workers"),
        (["--model", "resnet21"], "resnet20"),
        (["--load_model_path", "none.pt"], "--load_model_path none.pt: there is no such file"),
        (["--output_dir", "/proc/none"], "--output_dir: /proc/none"),
        (["--file_store_path", "none"], "none: there is no such folder"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_refused_before_anything_is_written(
    data: Path, tmp_path: Path, words: list[str], told: str
) -> None:
    refused(run(*train(data, *words), folder=tmp_path), told)
    assert not (tmp_path / "runs").exists()


def test_test_data_of_other_classes_is_refused(data: Path, tmp_path: Path) -> None:
    some_images(tmp_path / "other", classes=2, each=2, size=32)
    assert run("db", "create", "other", "other-lmdb", folder=tmp_path).status == 0
    ended = run(*train(data, "--test_data", "other-lmdb"), folder=tmp_path)
    refused(ended, "its classes class0, class1 aren't those of the training data")


def test_a_run_id_with_another_configuration_is_refused(data: Path, tmp_path: Path) -> None:
    words = train(data, "--run_id", "r", "--num_epochs", "1")
    assert run(*words, folder=tmp_path).status == 0
    ended = run(*words, "--momentum", "0.5", folder=tmp_path)
    refused(ended, "started with --momentum 0.9, now it is 0.5")


ENDLESS = ("--num_epochs", "100000", "--num_workers", "2", "--run_id", "r")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_of_a_step_ends_everything_within_5_seconds(
    data: Path, tmp_path: Path, number: int, status: int
) -> None:
    command = Command(*train(data, *ENDLESS), folder=tmp_path)
    command.line_with("epoch 2/")
    family = command.family()
    assert len(family) == 2
    command.send(number)
    assert command.wait(limit=5).status == status
    assert gone(family, limit=0)


def test_a_killed_worker_is_named_once_and_nothing_is_left(data: Path, tmp_path: Path) -> None:
    command = Command(*train(data, *ENDLESS), folder=tmp_path)
    command.line_with("epoch 2/")
    family = command.family()
    family[1].kill()
    ended = command.wait(limit=15)
    assert ended.status == 1
    assert ended.text.count("was killed by SIGKILL") == 1
    assert "rank" in ended.text
    assert "Traceback" not in ended.text
    assert gone(family, limit=0)


def test_workers_end_with_a_killed_supervisor(data: Path, tmp_path: Path) -> None:
    command = Command(*train(data, *ENDLESS), folder=tmp_path)
    command.line_with("epoch 2/")
    family = command.family()
    command.send(signal.SIGKILL)
    command.wait(limit=10)
    assert gone(family)


def test_a_live_run_is_refused_a_second_start(data: Path, tmp_path: Path) -> None:
    command = Command(*train(data, *ENDLESS), folder=tmp_path)
    command.line_with("epoch 2/")
    refused(run(*train(data, *ENDLESS), folder=tmp_path), "this run is alive")
    command.send(signal.SIGINT)
    assert command.wait(limit=5).status == 130


def test_a_damaged_image_is_named_once_by_its_record(data: Path, tmp_path: Path) -> None:
    with lmdb.open(str(data / "train-lmdb"), readonly=True, lock=False) as good, good.begin() as t:
        records = list(t.cursor())
    key, value = records[9]
    records[9] = (key, value[: len(value) // 2])
    with lmdb.open(str(tmp_path / "db")) as bad, bad.begin(write=True) as write:
        for record in records:
            write.put(*record)
    words = ("train", "--train_data", str(tmp_path / "db"), *SMALL, "--num_workers", "2")
    ended = run(*words, folder=tmp_path)
    assert ended.status == 1, ended.text
    assert "Traceback" not in ended.text
    assert ended.text.count("on machine 0") == 1
    assert key.decode() in ended.text
