"""Machines and ranks that disagree, come twice, come not at all, die, freeze, or aren't ours."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.cli.main import main
from tests.harness.data.image_folder import some_images
from tests.harness.network.ports import free_port
from tests.harness.processes.bad_inputs import (
    LIMIT,
    NET,
    NULL,
    RANK_PREFIX,
    Bad,
    answer,
    no_process_left,
    require_answer,
    require_message,
    write_model,
)
from tests.harness.processes.command import Command, Result
from tests.harness.processes.run_folders import wait_until_step

HOST = os.uname().nodename
OWN = (
    NET
    + '''

import json, os, signal


class Ends(nn.Module):
    """Rank 1 sends itself a signal in a step of its training."""

    def __init__(self, num_labels, number, step):
        super().__init__()
        self.net, self.number, self.left = net(num_labels), number, step
        self.here = json.loads(os.environ["PACELINE_WORKER"])["local_rank"] == 1

    def forward(self, images):
        if self.here and self.left == 0:
            os.kill(os.getpid(), self.number)
        self.left -= 1
        return self.net(images)


def dies_in_the_first_step(num_labels):
    return Ends(num_labels, signal.SIGKILL, 0)


def freezes(num_labels):
    return Ends(num_labels, signal.SIGSTOP, 2)
'''
)
SHARED = f"{NULL} --model own:net --run_id r --file_store_path ../meet "


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of machine 0, beside machine 1's and one that they share."""
    for name in ("0", "1", "meet"):
        (tmp_path / name).mkdir()
    (tmp_path / "1/own.py").write_text(OWN)
    return write_model(tmp_path / "0", monkeypatch, OWN)


class Machines:
    """Two machines, each in its folder, and what they say in the end."""

    def __init__(self, here: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = here.parent, environment

    def start(self, machine: int, words: str) -> Command:
        return Command(
            *f"{words} --num_shards 2 --shard_id {machine}".split(),
            folder=self._folder / str(machine),
            environment=self._environment,
        )

    def run(self, first: str, second: str) -> list[Result]:
        commands = [self.start(0, first), self.start(1, second)]
        return [command.wait(LIMIT) for command in commands]


def both_say(ends: list[Result], status: int, message: str) -> None:
    assert len({require_message(ended, status, message) for ended in ends}) == 1


def test_another_model_on_the_other_machine_is_told_by_both(here: Path) -> None:
    own = here.parent / "1/own.py"
    own.write_text(OWN.replace("nn.Linear(48, num_labels)", "nn.Linear(48, num_labels).double()"))
    with no_process_left() as environment:
        ends = Machines(here, environment).run(SHARED, SHARED)
    message = (
        rf"{RANK_PREFIX}the model's 2.weight is \[3, 48\] float32 on rank 0 \({HOST}\) and "
        rf"\[3, 48\] float64 on rank 1 \({HOST}\): build the same model on all ranks."
    )
    both_say(ends, 2, message)


def test_another_data_set_on_the_other_machine_is_told_by_both(here: Path) -> None:
    for machine, each in ((0, 2), (1, 3)):
        folder = here.parent / str(machine)
        some_images(folder / "images", classes=3, each=each, size=32)
        assert main(["db", "create", f"{folder}/images", f"{folder}/data"]) == 0
    words = f"{SHARED} --train_data data"
    with no_process_left() as environment:
        ends = Machines(here, environment).run(words, words)
    message = (
        rf"{RANK_PREFIX}--train_data's number of records is 6 on rank 0 \({HOST}\) and 9 on rank 1 "
        rf"\({HOST}\): give all machines the same data set."
    )
    both_say(ends, 2, message)


def test_another_number_of_machines_is_told_by_both_before_anything_is_written(here: Path) -> None:
    with no_process_left() as environment:
        machines = Machines(here, environment)
        first = machines.start(0, SHARED)
        second = Command(
            *f"{SHARED} --num_shards 3 --shard_id 1".split(),
            folder=here.parent / "1",
            environment=environment,
        )
        ends = [first.wait(LIMIT), second.wait(LIMIT)]
    message = (
        rf"(machine 1 \({HOST}\): )?--num_shards 3 on machine 1, but 2 on machine 0 \({HOST}\): "
        "give the same number on all machines."
    )
    for ended in ends:
        require_message(ended, 2, message)
    assert not (here / "runs").exists()
    assert list((here.parent / "meet").iterdir()) == []


def test_a_place_in_a_live_run_is_refused_and_the_run_goes_on(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    endless = f"{SHARED} --num_epochs 1000000"
    second = (
        rf"--shard_id 1 of run 'r' is taken by a live machine, host {HOST} \(.*\): give each "
        "machine its own number."
    )
    first = (
        rf"--run_id r is in use by a live run on host {HOST} \(process \d+; .*\): choose another, "
        "or stop that run."
    )
    with no_process_left() as environment:
        machines = Machines(here, environment)
        commands = [machines.start(i, endless) for i in (0, 1)]
        wait_until_step(here / "runs/r", 2, 0)
        for machine, message in ((1, second), (0, first)):
            words = f"{endless} --output_dir elsewhere --num_shards 2 --shard_id {machine}"
            require_message(answer(words, capfd), 2, message)
        commands[1].send(signal.SIGINT)
        ends = [command.wait(LIMIT) for command in commands]
    assert [ended.status for ended in ends] == [130, 130]
    assert not (here / "elsewhere").exists()


def test_a_stranger_at_machine_0s_port_changes_nothing(here: Path) -> None:
    port = free_port()
    words = f"{NULL} --model own:net --run_id r --master 127.0.0.1:{port}"
    with no_process_left() as environment:
        machines = Machines(here, environment)
        first = machines.start(0, words)
        first.line_with("waiting for machine 1")
        with (
            socket.create_connection(("127.0.0.1", port)) as silent,
            socket.create_connection(("127.0.0.1", port)) as loud,
        ):
            loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            ends = [command.wait(LIMIT) for command in (machines.start(1, words), first)]
            silent.sendall(b"\0")
    assert [ended.status for ended in ends] == [0, 0], ends
    assert not any("Traceback" in ended.text for ended in ends)


def test_a_rank_that_dies_in_the_first_step_is_named(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = (
        rf"rank 1 on machine 0 \({HOST}\) was killed by SIGKILL. If no user killed it, the machine "
        "ran out of memory: try a smaller batch."
    )
    words = f"{NULL} --model own:dies_in_the_first_step --num_workers 2 --no_snapshots"
    require_answer(Bad(command=words, message=message, status=1, writes=True), here, capfd)


@pytest.mark.parametrize(("sync", "whom"), [("allreduce", "a peer"), ("notified", "rank 1")])
def test_a_rank_that_freezes_is_waited_for_as_long_as_the_flag_says(
    sync: str, whom: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = (
        rf"rank 0 on machine 0 \({HOST}\): rank 0 waited 2 s for ({whom}|a peer) in .* step [12]: "
        r"(a peer|it) hangs, can't be reached, or needs a longer --timeout "
        r"\(--first_iter_timeout at the start\)."
    )
    words = f"{NULL} --epoch_size 400 --model own:freezes --num_workers 2 --timeout 2 --sync {sync}"
    words += " --no_snapshots"
    require_answer(Bad(command=words, message=message, status=1, writes=True), here, capfd)


LAUNCHED = {
    "RANK and WORLD_SIZE are set and LOCAL_RANK, LOCAL_WORLD_SIZE aren't: start all processes with "
    "torchrun, which sets all of these variables, or unset RANK and WORLD_SIZE.": {
        **{"WORLD_SIZE": "2", "RANK": "1"},
    },
    "RANK 2 and WORLD_SIZE 2: RANK must be less than WORLD_SIZE; check where these variables are "
    "set.": {
        **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        **{"RANK": "2", "LOCAL_RANK": "0"},
    },
    "WORLD_SIZE is 'two' in the environment: it must be a whole number.": {
        **{"WORLD_SIZE": "two", "LOCAL_WORLD_SIZE": "2"},
        **{"RANK": "1", "LOCAL_RANK": "1"},
    },
}


@pytest.mark.parametrize("message", LAUNCHED)
def test_a_launchers_variables_that_contradict_each_other_are_named(
    message: str, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in LAUNCHED[message].items():
        monkeypatch.setenv(variable, value)
    require_answer(Bad(command=f"{NULL} --model own:net", message=message), here, capfd)


@pytest.mark.parametrize(
    ("rank", "missing"),
    [(0, "rank 1 of 2"), (1, r"rank 0 of 2 \(127.0.0.1:{} can't be reached: Connection refused\)")],
    ids=["rank 1", "rank 0"],
)
def test_a_rank_that_never_comes_is_named_within_the_limit(
    rank: int,
    missing: str,
    here: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, this = str(free_port()), str(rank)
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": this, "LOCAL_RANK": this}
    rendezvous = {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for variable, value in {**place, **rendezvous}.items():
        monkeypatch.setenv(variable, value)
    message = (
        rf"rank {rank} of 2 on {HOST}: {missing.format(port)} didn't come within 1 s: check "
        "their output, or give a longer --first_iter_timeout."
    )
    words = f"{NULL} --model own:net --first_iter_timeout 1"
    require_answer(Bad(command=words, message=message, status=1), here, capfd)


def test_a_flag_that_contradicts_torchruns_count_names_both(
    here: Path,
) -> None:
    alone = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    rendezvous = {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with no_process_left() as environment:
        words = f"{NULL} --model own:net --num_workers 3".split()
        command = Command(*words, folder=here, environment={**environment, **alone, **rendezvous})
        ended = command.wait(LIMIT)
    message = (
        "--num_workers 3: contradicts the launcher: torchrun started 1 on this machine; remove "
        "--num_workers, or start a matching number of processes."
    )
    require_message(ended, 2, message)
    assert not (here / "runs").exists()
