"""Ctrl-C and SIGTERM at bad moments: in the start, twice, in an evaluation, into a checkpoint."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from paceline.state.checkpoint_files import read_checkpoint
from tests.harness.processes.bad_inputs import LIMIT, NET, NULL, no_process_left
from tests.harness.processes.command import Command, Result
from tests.harness.processes.run_folders import wait_until, wait_until_step

OWN = (
    NET
    + '''
import threading


def large(num_labels):
    """A net whose checkpoints take a while: 40 MB."""
    return nn.Sequential(
        nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 2200), nn.Linear(2200, 2200),
        nn.Linear(2200, num_labels),
    )


class Slow(nn.Module):
    """Tells by a file that an evaluation has begun, and then takes its time."""

    def __init__(self, num_labels):
        super().__init__()
        self.net = net(num_labels)

    def forward(self, images):
        if not self.training:
            open("evaluating", "w").close()
            threading.Event().wait(60)
        return self.net(images)
'''
)
ENDLESS = f"{NULL} --num_epochs 1000000 --run_id r --model own:net"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def stopped(
    folder: Path,
    words: str,
    moment: Callable[[Command], object],
    *numbers: signal.Signals,
    real: bool = False,
) -> Result:
    """Run a command, send it signals at a moment, and see that nobody is left."""
    with no_process_left() as environment:
        command = Command(*words.split(), folder=folder, environment=environment, real=real)
        moment(command)
        for number in numbers:
            command.send(number)
        ended = command.wait(LIMIT)
    assert "Traceback" not in ended.text, ended.text
    assert ended.status in {128 + number for number in numbers}, ended.text
    return ended


def test_ctrl_c_while_torch_is_loaded_is_quiet_and_leaves_nothing(here: Path) -> None:
    def loads_torch(command: Command) -> None:
        process = psutil.Process(command.pid)
        wait_until(lambda: any("libtorch_cpu" in m.path for m in process.memory_maps()))

    ended = stopped(here, ENDLESS, loads_torch, signal.SIGINT, real=True)
    assert ended.text in ("", "paceline: stopped by SIGINT.\n")
    assert not (here / "runs").exists()


def test_ctrl_c_while_the_workers_start_ends_them(here: Path) -> None:
    def has_workers(command: Command) -> None:
        wait_until(lambda: len(command.family()) == 2)

    ended = stopped(here, f"{ENDLESS} --num_workers 2", has_workers, signal.SIGINT)
    assert ended.text.startswith("paceline: stopped by SIGINT on machine 0")
    assert not (here / "runs/r/checkpoints").exists()


def test_ctrl_c_while_machines_are_waited_for_leaves_nothing(here: Path) -> None:
    (here / "meet").mkdir()
    words = f"{ENDLESS} --num_shards 2 --file_store_path meet"
    stopped(here, words, lambda c: c.line_with("waiting for machine 1"), signal.SIGINT)
    assert not (here / "runs").exists()
    assert list((here / "meet").iterdir()) == []


def test_a_second_ctrl_c_ends_at_once_and_keeps_the_checkpoints_whole(here: Path) -> None:
    words = f"{ENDLESS} --checkpoint_steps 1"
    stopped(here, words, lambda _: wait_until_step(here / "runs/r", 5, 0), *[signal.SIGINT] * 2)
    files = list((here / "runs/r/checkpoints").glob("step-*.pt"))
    assert files
    assert all(read_checkpoint(file) for file in files)


def test_ctrl_c_in_an_evaluation_keeps_the_epochs_steps(here: Path) -> None:
    words = f"{NULL} --run_id r --model own:Slow --test_data null"

    def evaluates(_: Command) -> None:
        wait_until((here / "evaluating").exists)

    stopped(here, words, evaluates, signal.SIGINT)
    (file,) = (here / "runs/r/checkpoints").glob("step-*.pt")
    assert read_checkpoint(file)["position"]["number"] == 2


def test_a_signal_into_a_checkpoint_leaves_it_whole(here: Path) -> None:
    words = f"{ENDLESS} --model own:large --checkpoint_steps 1"
    folder = here / "runs/r/checkpoints"

    def writes(_: Command) -> None:
        wait_until(lambda: any(folder.glob(".step-*.part")))

    stopped(here, words, writes, signal.SIGTERM)
    files = list(folder.glob("step-*.pt"))
    assert files
    assert all(read_checkpoint(file) for file in files)


def test_little_is_imported_before_ctrl_c_is_heard() -> None:
    code = "import paceline.cli.main, sys; print(*sys.modules)"
    message = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout
    assert not {"torch", "tyro", "numpy", "difflib", "importlib.metadata"} & set(message.split())
