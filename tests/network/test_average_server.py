"""An averaging server on another machine: found over the cable, and reached by it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.network.namespaces import Machine, two_machines
from tests.harness.processes.command import Running
from tests.harness.processes.run_folders import write_net

ROOT = Path(__file__).parents[2]
MEET = ("--run_id", "r", "--file_store_path", "meet")
TRAIN = (
    *("train", "--train_data", "null", "--epoch_size", "60", "--image_size", "32"),
    *("--augment", "none", "--num_labels", "3", "--batch_size", "6", "--num_epochs", "2"),
    *("--model", "net:slow", "--num_workers", "2", "--sync", "average", "--average_every", "4"),
    *("--average_through", "server", "--average_server", "apart", *MEET),
)


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as made:
        yield made


def start(machine: Machine, folder: Path, *arguments: str) -> Running:
    command = machine.inside(sys.executable, "-m", "paceline.cli.main", *arguments)
    return Running(command, folder=folder, variables={"PYTHONPATH": str(ROOT)})


def test_workers_of_one_machine_merge_through_a_server_on_another(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    write_net(tmp_path)
    (tmp_path / "slow").write_text("0 1")
    (tmp_path / "meet").mkdir()
    server = start(machines[1], tmp_path, "serve", *MEET)
    server.line_with("waiting for run 'r'")
    ended = start(machines[0], tmp_path, *TRAIN).wait()
    assert ended.status == 0, ended.text
    stopped = server.wait()
    assert stopped.status == 0, stopped.text
    assert "the run's workers have ended." in stopped.text
