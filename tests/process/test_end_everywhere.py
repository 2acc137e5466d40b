"""Two machines on this host, without a folder in common: one of them ends the run on both."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from paceline.cli.main import main
from paceline.cluster.supervision.requests.run_requests import ask_status
from paceline.observe.event_file import find_event_files, read_events
from tests.harness.processes.command import Command, all_end, loss_of
from tests.harness.processes.fork_server import environment_of
from tests.harness.processes.run_folders import wait_until, wait_until_step, write_net

STEPS = 12
TRAIN = (
    *("train", "--train_data", "null", "--epoch_size", "72", "--image_size", "32"),
    *("--augment", "none", "--num_labels", "3", "--batch_size", "6", "--run_id", "r"),
    *("--model", "net:plain", "--sync", "allreduce", "--num_epochs", "100000"),
    *("--num_shards", "2", "--file_store_path", "meet"),
)


def words(machine: int, workers: int) -> tuple[str, ...]:
    """Return the command of a machine, which has an output folder of its own."""
    own = ("--shard_id", str(machine), "--num_workers", str(workers))
    return (*TRAIN, *own, "--output_dir", f"out{machine}")


def run_of(folder: Path, machine: int) -> Path:
    return folder / f"out{machine}" / "r"


def saved_at(folder: Path, step: int) -> int:
    """Count the checkpoints of a step that members of all machines recorded."""
    folders = [run_of(folder, machine) for machine in (0, 1)]
    return sum(
        event["event"] == "checkpoint" and event["step"] == step
        for _, path in find_event_files(*folders)
        for event in read_events(path)
    )


def cost_of_loss(run: Path) -> float | None:
    """Return what a run's first loss cost, as a process of this machine reports; None: unknown."""
    answered = ask_status(run)
    losses = () if answered is None else answered[0].losses
    return losses[0].seconds if losses else None


def last_step(run: Path) -> int:
    """Return the number of steps that a machine's members completed."""
    steps = [
        event["step"]
        for _, path in find_event_files(run)
        for event in read_events(path)
        if event["event"] == "step"
    ]
    return max(steps) + 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_net(tmp_path)
    (tmp_path / "meet").mkdir()
    return tmp_path


def test_any_machine_shows_a_loss_and_stops_all(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    machines = [Command(*words(m, 2 - m), folder=folder) for m in (0, 1)]
    wait_until_step(run_of(folder, 0), 3, generation=0)
    (victim,) = (
        process
        for process in machines[0].family()
        if json.loads(environment_of(process)["PACELINE_WORKER"])["local_rank"] == 1
    )
    victim.kill()
    wait_until(lambda: cost_of_loss(run_of(folder, 1)) is not None)
    capfd.readouterr()
    assert main(["status", str(run_of(folder, 1)), "--json"]) == 0
    status = json.loads(capfd.readouterr().out)
    assert [member["machine"] for member in status["members"]] == [0, 1]
    assert (status["generation"], status["active"]) == (1, True)
    assert status["step"] >= 3
    (loss,) = status["losses"]
    assert loss["generation"] == 0
    assert re.fullmatch(loss_of(r"rank 1 on machine 0 \(\S+\)"), loss["cause"])
    assert loss["seconds"] > 0
    (folder / "meet").rename(folder / "lost")  # the request goes another way
    family = [process for machine in machines for process in machine.family()]
    assert main(["stop", str(run_of(folder, 1))]) == 0
    ends = [machine.wait() for machine in machines]
    assert all_end(family)
    assert [end.status for end in ends] == [143, 143], ends
    assert [end.text.count("is saved in") for end in ends] == [1, 0], ends
    steps = last_step(run_of(folder, 0))
    assert saved_at(folder, steps) == 1
    reason = "stopped by SIGTERM on machine 1 ("
    assert all(reason in end.text for end in ends), ends
    assert not any("Traceback" in end.text for end in ends), ends


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A terminal: its master end, which a test may close, and the one for a program."""
    ends = pty.openpty()
    yield ends
    for end in ends:
        with suppress(OSError):  # closed by the test
            os.close(end)


@pytest.mark.alone
def test_a_closed_terminal_of_one_machine_ends_all_within_five_seconds(
    folder: Path, terminal: tuple[int, int]
) -> None:
    master, slave = terminal
    first = Command(*words(0, 1), folder=folder)
    second = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli.main", *words(1, 1)],
        cwd=folder,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        wait_until_step(run_of(folder, 0), 3, generation=0)
        family = [
            *first.family(),
            psutil.Process(second.pid),
            *psutil.Process(second.pid).children(),
        ]
        os.close(slave)
        os.close(master)
        assert all_end(family, limit=5)
        assert second.wait() == 128 + signal.SIGHUP
    finally:
        second.kill()
        second.wait()
    ended = first.wait()
    assert ended.status == 128 + signal.SIGHUP
    assert "stopped by SIGHUP on machine 1 (" in ended.text
    assert saved_at(folder, last_step(run_of(folder, 0))) == 1
