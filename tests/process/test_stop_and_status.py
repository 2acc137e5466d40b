"""`paceline stop` and `paceline status`: real processes, with and without their supervisor."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from paceline.cli.main import main
from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.supervision.requests.member_record import MemberRecord, read_records
from paceline.cluster.supervision.requests.run_requests import stop_run
from tests.harness.processes.command import Command, all_end
from tests.harness.processes.run_folders import events, wait_until
from tests.harness.processes.supervisor_stage import (
    LIMIT,
    SURVIVING,
    Actor,
    Stage,
    Supervisor,
    at_most,
)
from tests.harness.processes.tiny_run import SMALL, make_database


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path) as made:
        yield made


@pytest.fixture
def orphans(stage: Stage, tmp_path: Path) -> list[Actor]:
    """Two workers of the run `tmp_path`, whose supervisor was killed."""
    supervisor = stage.start(RunPlan(workers=2), SURVIVING)
    actors = stage.actors(2)
    for actor in actors:
        actor.obey("survive", f"present {tmp_path}")
    supervisor.send(signal.SIGKILL)
    for actor in actors:
        assert actor.receive_line() == "outlived"
    return actors


@pytest.mark.alone
def test_orphans_are_found_and_stopped(
    orphans: list[Actor], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for actor in orphans:
        actor.obey("stop-softly")
    assert main(["status", str(tmp_path)]) == 0
    assert "is active: generation 2, 7 steps completed" in capfd.readouterr().out
    with at_most(5):
        assert main(["stop", str(tmp_path)]) == 0
    assert capfd.readouterr().out == (
        f"run {tmp_path.name} is stopped: 2 processes on this machine ended.\n"
    )
    assert all(actor.ended(within=0.5) for actor in orphans)
    assert main(["stop", str(tmp_path)]) == 0
    assert "isn't active on this machine" in capfd.readouterr().out
    assert main(["status", str(tmp_path)]) == 1
    assert "isn't active on this machine" in capfd.readouterr().out


def test_what_doesnt_stop_in_time_is_named(
    orphans: list[Actor], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for actor in orphans:
        actor.obey("stubborn")
    assert main(["stop", str(tmp_path), "--timeout", "0.2"]) == 1
    out = capfd.readouterr().out
    assert "2 processes on this machine still running after 0.2 s" in out
    pids = " ".join(str(actor.pid) for actor in orphans)
    assert out.rstrip().endswith(f"end them with kill -9 {pids}.")


def test_a_process_without_its_socket_gets_a_signal(orphans: list[Actor], tmp_path: Path) -> None:
    for record in read_records(tmp_path):  # as of a process in another network namespace
        replace(record, socket="unknown").write(tmp_path)
    assert main(["stop", str(tmp_path)]) == 0
    assert all(actor.ended(within=0.5) for actor in orphans)


def test_workers_are_stopped_whose_supervisor_is_killed_while_it_is_asked(
    stage: Stage, tmp_path: Path
) -> None:
    supervisor = stage.start(RunPlan(workers=2), SURVIVING)
    actors = stage.actors(2)
    for actor in actors:
        actor.obey("survive", "stop-softly", f"present {tmp_path}")
    record_of_supervisor(supervisor).write(tmp_path)
    supervisor.send(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(supervisor.process.pid).status() == psutil.STATUS_STOPPED)
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop_run, tmp_path, LIMIT)
        wait_until(lambda: signal.SIGTERM in pending(supervisor))
        supervisor.send(signal.SIGKILL)
        result = stopping.result()
    assert {record.process.pid for record in result.ended} >= {actor.pid for actor in actors}
    assert len(result.ended) == 3


def record_of_supervisor(supervisor: Supervisor) -> MemberRecord:
    """Return the record of a supervisor whose socket doesn't answer."""
    pid = supervisor.process.pid
    assert pid is not None
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    process = replace(ProcessIdentity.of_this_process(), pid=pid, started=int(started))
    return MemberRecord(
        id="supervisor-0", role="supervisor", machine=0, process=process, socket="unknown"
    )


def pending(supervisor: Supervisor) -> set[int]:
    """Return the signals that a stopped process will receive."""
    status = Path(f"/proc/{supervisor.process.pid}/status").read_text()
    (mask,) = (int(line.split()[1], 16) for line in status.splitlines() if "ShdPnd" in line)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def holder_of(run: Path, byte: int) -> int:
    """Return the process that has locked a byte of the run folder's lock; 0: none has."""
    structure = struct.Struct("hhqqi4x")  # struct flock of fcntl(2)
    with (run / ".alive.0").open("r+b") as file:
        wanted = structure.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        kind, *_, pid = structure.unpack(fcntl.fcntl(file, fcntl.F_GETLK, wanted))
    return 0 if kind == fcntl.F_UNLCK else pid


@pytest.mark.alone
def test_a_run_of_the_command_is_shown_and_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    database = make_database(tmp_path)
    words = ("--train_data", database, *SMALL, "--num_epochs", "100000")
    command = Command("train", *words, "--num_workers", "2", "--run_id", "r", folder=tmp_path)
    command.line_with("epoch 1/")
    monkeypatch.chdir(tmp_path)
    family = command.family()
    capfd.readouterr()
    assert main(["status", "r", "--json"]) == 0
    status = json.loads(capfd.readouterr().out)
    assert (status["run"], status["active"], status["generation"]) == ("r", True, 0)
    assert status["step"] >= 1
    assert [member["rank"] for member in status["members"]] == [0, 1]
    assert {member["pid"] for member in status["members"]} <= {each.pid for each in family}
    workers = [member["pid"] for member in status["members"]]
    assert [holder_of(Path("runs/r"), 1 + rank) for rank in (0, 1)] == workers
    with at_most(6):
        assert main(["stop", "r"]) == 0
    assert "run r is stopped: 3 processes on this machine ended." in capfd.readouterr().out
    ended = command.wait()
    assert ended.status == 143
    assert "is saved in runs/r" in ended.text
    assert all_end(family, limit=1)
    assert not (tmp_path / "runs" / "r" / "members").exists()
    assert not list((tmp_path / "runs" / "r").glob(".alive*"))
    steps = max(each["step"] for each in events(Path("runs/r"), 0) if each["event"] == "step") + 1
    assert main(["status", "r"]) == 1
    assert f"isn't active on this machine. Last known: generation 0, {steps} steps; a " in (
        capfd.readouterr().out
    )
