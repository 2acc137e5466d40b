"""Machines find the addresses that connect them, whatever their hostnames stand for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.network.namespaces import Machine, ip, two_machines
from tests.harness.processes.fork_server import ServedPopen

ROOT = Path(__file__).parents[2]
LIMIT = 60


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as made:
        yield made


def run_on(machines: tuple[Machine, Machine], folder: Path, interfaces: str) -> list[str]:
    """Run one supervisor a machine, with 1 and 2 workers; return what each machine prints."""
    running = []
    for number, machine in enumerate(machines):
        arguments = ["r", str(number), "2", str(number + 1), str(folder), interfaces]
        command = machine.inside(
            sys.executable, "-m", "tests.harness.processes.machine_supervisor", *arguments
        )
        running.append(
            ServedPopen(
                command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    try:
        return [process.communicate(timeout=LIMIT)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_the_cable_is_found_though_the_hostname_stands_for_a_wrong_address(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    ask = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    answer = subprocess.run(
        machines[0].inside(sys.executable, "-c", ask), check=True, capture_output=True, text=True
    )
    assert answer.stdout == "192.0.2.1\n"
    first, second = run_on(machines, tmp_path, interfaces="")
    both = "('10.77.0.1', '10.77.0.2')"
    assert f"rank 0 at 10.77.0.1 of {both}: 3.0" in first
    assert f"rank 1 at 10.77.0.2 of {both}: 3.0" in second
    assert f"rank 2 at 10.77.0.2 of {both}: 3.0" in second
    assert list(tmp_path.iterdir()) == []


def test_a_named_interface_is_the_only_one_that_is_tried(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    for said in run_on(machines, tmp_path, interfaces="wrong0"):
        assert "has no address that machine " in said
        assert "can reach (it has 172.31.77.1)" in said
        assert "10.77.0" not in said


def test_machines_without_ipv4_meet_and_exchange_over_ipv6(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    for number, machine in enumerate(machines):
        for device in ("lo", "wrong0", "eth0"):
            ip("-n", machine.name, "-4", "address", "flush", "dev", device)
        place = (f"fd77::{number + 1}/64", "dev", "eth0", "nodad")
        ip("-n", machine.name, "address", "add", *place)
    first, second = run_on(machines, tmp_path, interfaces="")
    both = "('fd77::1', 'fd77::2')"
    assert f"rank 0 at fd77::1 of {both}: 3.0" in first
    assert f"rank 1 at fd77::2 of {both}: 3.0" in second
    assert f"rank 2 at fd77::2 of {both}: 3.0" in second


def test_workers_of_a_machine_without_ipv4_train(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    ip("-n", machines[0].name, "-4", "address", "flush", "dev", "lo")
    words = ("--train_data", "null", "--epoch_size", "8", "--model", "resnet20", "--use_cpu")
    words += ("--image_size", "16", "--num_labels", "3", "--batch_size", "2", "--num_epochs", "1")
    command = [sys.executable, "-m", "paceline.cli.main", "train", *words, "--num_workers", "2"]
    ended = subprocess.run(
        machines[0].inside("env", f"PYTHONPATH={ROOT}", *command, "--sync", "allreduce"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
