"""Tasks of srun on two machines: their rendezvous is on the first node, their cable is found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.network.namespaces import Machine, two_machines
from tests.harness.processes.fork_server import ServedPopen
from tests.harness.processes.launcher_processes import facts, srun_variables

ROOT = Path(__file__).parents[2]
LIMIT = 60


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as made:
        yield made


def test_tasks_of_two_machines_find_each_other_over_the_cable(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    place = {"MASTER_ADDR": machines[0].address, "PYTHONPATH": str(ROOT)}
    running = []
    for variables in srun_variables([1, 2]):
        words = [f"{name}={value}" for name, value in {**variables, **place}.items()]
        program = [
            "env",
            *words,
            sys.executable,
            "-m",
            "tests.harness.processes.launched_program",
            "40",
            "sum",
        ]
        command = machines[int(variables["SLURM_NODEID"])].inside(*program)
        running.append(
            ServedPopen(
                command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    try:
        said = [process.communicate(timeout=LIMIT)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0, 0, 0], said
    found = facts(tmp_path)
    assert [fact["addresses"] for fact in found] == [["10.77.0.1", "10.77.0.2"]] * 3
    assert [fact["machine"] for fact in found] == [0, 1, 1]
    assert {fact["sum"] for fact in found} == {3.0}
