"""Two machines that exchange by puts: they train as one does, and say so when the cable is cut."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.network.namespaces import Machine, cut, two_machines
from tests.harness.processes.bad_inputs import NULL
from tests.harness.processes.command import run
from tests.harness.processes.fork_server import ServedPopen
from tests.harness.processes.run_folders import losses, wait_until_step, write_net

ROOT = Path(__file__).parents[2]
LIMIT = 100
WORDS = f"{NULL} --epoch_size 90 --num_labels 3 --model net:plain --run_id r --num_epochs"
PLACE = "--num_shards 2 --sync notified --bucket_mb 0.001"
FOLDER = "--file_store_path ../meet"


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as made:
        yield made


@contextmanager
def started(
    machines: tuple[Machine, Machine], folder: Path, words: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a supervisor on each machine, with 1 and 2 workers."""
    (folder / "meet").mkdir()
    running = []
    for number, machine in enumerate(machines):
        here = folder / str(number)
        here.mkdir()
        write_net(here)
        own = f"{words} {PLACE} --shard_id {number} --num_workers {number + 1}".split()
        command = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "paceline.cli.main", *own]
        running.append(
            ServedPopen(
                machine.inside(*command),
                cwd=here,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_two_machines_train_as_one_process_does(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    write_net(tmp_path)
    alone = run(*f"{WORDS} 2 --batch_size 8".split(), folder=tmp_path)
    assert alone.status == 0, alone.text
    words = f"{WORDS} 2 --batch_size 4 --connections 3 --master {machines[0].address}:29500"
    with started(machines, tmp_path, words) as running:
        said = [process.communicate(timeout=LIMIT)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert "3 workers on 2 machines" in said[0]
    assert "c10d" not in "".join(said)  # torch misses the addresses' hostnames
    expected = losses(tmp_path / "runs/r")
    assert len(expected) == 2 * 12
    for step, (loss,) in losses(tmp_path / "0/runs/r").items():
        assert loss == pytest.approx(expected[step][0], abs=1e-6)


def test_a_cable_that_is_cut_in_mid_step_is_told_within_the_limit_by_both(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    words = f"{WORDS} 100000 --timeout 3 --no_snapshots {FOLDER}"
    with started(machines, tmp_path, words) as running:
        wait_until_step(tmp_path / "0/runs/r", 5, 0)
        cut(machines[0])
        said = [process.communicate(timeout=LIMIT)[0] for process in running]
    assert [process.returncode for process in running] == [1, 1], said
    for text in said:
        # A rank that has given up is lost to the one beside it, which may say so first.
        told = (
            r"rank \d waited 3 s for (rank(s 1,)? \d|a peer) in (.*step \d+|the .*): (it|a peer) "
            r"hangs"
            r"|rank [12] lost (rank [12]|a peer) in (.*step \d+|the .*): "
        )
        assert re.search(told, text.splitlines()[-1]), text
        assert "Traceback" not in text
