"""Scripts under `paceline launch` continue with one process of all; real `kill -9`."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil

from paceline.observe.event_file import find_event_files, read_events
from paceline.observe.ledger import prove
from paceline.state.checkpoint_files import Checkpoints
from tests.harness.library.loss_script import EPOCHS, STEPS
from tests.harness.network.ports import free_port
from tests.harness.processes.command import Command, all_end, loss_of
from tests.harness.processes.fork_server import environment_of
from tests.harness.processes.run_folders import wait_until

SCRIPT = (sys.executable, "-m", "tests.harness.library.loss_script")
ROOT = str(Path(__file__).parents[2])
HOST = re.escape(os.uname().nodename)


def start(folder: Path, *words: str, run: str, last: bool = False) -> Command:
    command = ("launch", *words, "--", *SCRIPT, run, *["last"] * last)
    return Command(*command, folder=folder, environment={"PYTHONPATH": ROOT})


def worker_of(command: Command, local_rank: int) -> psutil.Process:
    """Return the process of a worker, not its wrapper."""
    (found,) = (
        process
        for process in command.family()
        if not process.children()
        and json.loads(environment_of(process)["PACELINE_WORKER"])["local_rank"] == local_rank
    )
    return found


def wait_for_step(run: Path, generation: int) -> None:
    """Wait until a member whose file is in a folder has ended two steps of a generation."""

    def steps() -> int:
        return sum(
            event["event"] == "step" and event["generation"] == generation
            for _, path in find_event_files(run)
            for event in read_events(path)
        )

    wait_until(lambda: steps() >= 2)


def weights_of(text: str) -> list[str]:
    return re.findall(r"weights (\S+)", text)


def test_a_machine_without_workers_lets_the_other_one_continue(tmp_path: Path) -> None:
    """Without a witness, machine 0 decides: its supervisor votes for it."""
    place = ("--num_shards", "2", "--run_id", "r", "--master", f"127.0.0.1:{free_port()}")
    machines = [
        start(tmp_path, "-n", n, *place, "--shard_id", str(i), run=f"run{i}")
        for i, n in enumerate(("2", "1"))
    ]
    left = tmp_path / "run1"
    wait_for_step(left, 0)
    victims = [worker_of(machines[0], local_rank) for local_rank in (0, 1)]
    victims[0].kill()
    wait_for_step(left, 1)
    victims[1].kill()
    wait_for_step(left, 2)
    (tmp_path / "killed").touch()
    lost, ended = (machine.wait() for machine in machines)
    assert ended.status == 0, ended.text
    assert lost.status == 1, lost.text
    second = rf"rank 0 of generation 1 on machine 0 \({HOST}\)"
    first = loss_of(rf"rank 0 on machine 0 \({HOST}\)")
    assert re.search(rf"{first}\. 2 processes continue from step ", lost.text), lost.text
    assert re.search(rf"{loss_of(second)}\. 1 process continues from step ", ended.text), ended.text
    last = lost.text.splitlines()[-1]
    assert re.search(rf"{second} was killed by SIGKILL\. If no user killed it, ", last), lost.text
    proof = prove(
        (member, read_events(path))
        for member, path in find_event_files(tmp_path / "run0", tmp_path / "run1")
    )
    assert proof.exact, proof.faults
    assert proof.done == EPOCHS * STEPS
    alone = start(tmp_path, "-n", "1", run="alone").wait()
    assert weights_of(ended.text) == weights_of(alone.text)


def test_the_end_of_a_run_outlives_the_rank_that_writes_it(tmp_path: Path) -> None:
    ended = start(tmp_path, "-n", "2", run="run", last=True).wait()
    assert ended.status == 0, ended.text
    lost = loss_of(rf"rank 0 on machine 0 \({HOST}\)")
    continued = rf"{lost}\. 1 process continues from step {EPOCHS * STEPS} "
    assert re.search(continued, ended.text), ended.text
    assert len(set(weights_of(ended.text))) == 1
    assert Checkpoints(tmp_path / "run", 2).newest_step() == EPOCHS * STEPS
    proof = prove(
        (member, read_events(path)) for member, path in find_event_files(tmp_path / "run")
    )
    assert proof.exact, proof.faults
    assert proof.done == EPOCHS * STEPS


def test_ctrl_c_on_one_machine_ends_the_scripts_of_all(tmp_path: Path) -> None:
    place = ("--num_shards", "2", "--run_id", "r", "--master", f"127.0.0.1:{free_port()}")
    machines = [
        start(tmp_path, "-n", "1", *place, "--shard_id", str(i), run=f"run{i}") for i in (0, 1)
    ]
    wait_for_step(tmp_path / "run0", 0)
    family = [process for machine in machines for process in machine.family()]
    machines[1].send(signal.SIGINT)  # before step LAST_KILL, or while the loop waits there
    ends = [machine.wait() for machine in machines]
    assert all_end(family)
    assert [end.status for end in ends] == [130, 130], ends
    assert all("stopped by SIGINT on machine 1 (" in end.text for end in ends), ends
    assert [end.text.count(" is saved in ") for end in ends] == [1, 0], ends


def test_a_script_continues_without_its_supervisor_and_says_so_once(tmp_path: Path) -> None:
    command = start(tmp_path, "-n", "2", run="run")
    wait_for_step(tmp_path / "run", 0)
    command.send(signal.SIGKILL)
    said = (
        "paceline: the supervisor of machine 0 was killed; its workers continue. End the run with"
    )
    assert command.line_with("supervisor") == f"{said} `paceline stop run`.\n"
    (tmp_path / "killed").touch()
    ended = command.wait()
    assert ended.status == -signal.SIGKILL
    assert "supervisor" not in ended.text
    assert len(weights_of(ended.text)) == 2
    assert len(set(weights_of(ended.text))) == 1
    proof = prove(
        (member, read_events(path)) for member, path in find_event_files(tmp_path / "run")
    )
    assert proof.exact, proof.faults
    assert proof.done == EPOCHS * STEPS
