"""Sums of a machine by collectives, on real processes: Gloo stands in for NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import FileStore

from paceline.comm.communicator import Communicator
from paceline.config.world import SyncConfig
from paceline.errors import PeerLost
from paceline.generation.run import Run
from paceline.wiring import exchange
from tests.harness.equivalence.large_batch import convnet
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.put_synchronizers import context_on_gloo
from tests.harness.processes.gloo_processes import spawn
from tests.harness.processes.launcher_processes import srun

LOST, STEP = 3, 2
MACHINES = (2, 2)
AS_ON_GPUS = """
import runpy, sys
from paceline.wiring import exchange
from paceline.algorithms import open_exchange


class Drained(open_exchange.MachineSums):
    def drain(self):
        super().drain()
        print(f"rank {self._rank} of ranks {sorted([self._rank, *self._others])} drains")


exchange.adds_up_on_gpus = lambda context, sync: sync == "notified"
open_exchange.MachineSums = Drained
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""
OWN = """
from torch import nn


def small(num_labels):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.Linear(8, num_labels))
"""
PROGRAMS = {
    "command": (
        *("paceline.cli.main", "train", "--train_data", "null", "--epoch_size", "24"),
        *("--model", "own:small", "--image_size", "32", "--augment", "none", "--num_labels", "3"),
        *(
            "--batch_size",
            "8",
            "--use_cpu",
            "--num_epochs",
            "1",
            "--run_id",
            "r",
            "--sync",
            "notified",
        ),
    ),
    "library": (
        "tests.harness.library.library_script",
        "run",
        "--epochs",
        "1",
        "--sync",
        "notified",
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_workers_connect_with_their_machines_and_end_well(tmp_path: Path, program: str) -> None:
    (tmp_path / "as_on_gpus.py").write_text(AS_ON_GPUS)
    (tmp_path / "own.py").write_text(OWN)
    with srun(["as_on_gpus.py", *PROGRAMS[program]], tmp_path, nodes=(2, 1)) as workers:
        ends = [worker.wait() for worker in workers]
    for rank, (end, ranks) in enumerate(zip(ends, ("[0, 1]", "[0, 1]", "[2]"), strict=True)):
        assert end.status == 0, end.text
        assert f"rank {rank} of ranks {ranks} drains" in end.text


def bench_of(c: Communicator, model: nn.Module, rendezvous: Path) -> Bench:
    """Make a rank's bench as a worker does."""
    context = context_on_gloo(MACHINES, c, FileStore(str(rendezvous), -1), 30.0)
    bench = Bench.of(c, model)
    bench.replica.close()
    exchange.adds_up_on_gpus = lambda context, sync: True  # in this process, which ends soon
    config = SyncConfig(sync="notified", bucket_mb=0.002)
    bench.replica = exchange.replicate(bench.model, bench.optimizer, Run(context=context), config)
    return bench


def loses_a_rank(c: Communicator, model: nn.Module, rendezvous: Path) -> str:
    bench = bench_of(c, model, rendezvous)
    for number in range(STEP + 3):
        if (c.rank, number) == (LOST, STEP):
            return ""  # and its process ends, without a word
        try:
            bench.step(number)
        except PeerLost as error:
            bench.replica.close()
            return str(error)
    return "nobody was lost"


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return convnet()


def test_a_process_that_ends_is_named_by_its_neighbour_and_nobody_hangs(
    model: nn.Module, tmp_path: Path
) -> None:
    *others, leader, _ = spawn(sum(MACHINES), loses_a_rank, model, tmp_path / "rendezvous")
    assert leader.startswith(f"rank 2 lost rank {LOST} in bucket ")
    assert others[0].startswith("rank 0 lost rank 2 in ")
    assert others[1].startswith("rank 1 lost rank 0 in bucket ")
