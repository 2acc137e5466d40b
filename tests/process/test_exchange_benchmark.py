"""The rows of the benchmark of the exchange add up the same values."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import Tensor

from paceline.comm.communicator import Communicator
from tests.harness.documents.benchmark_runs import BENCHMARKS, LIMIT, benchmark
from tests.harness.processes.gloo_processes import spawn

ROWS = ("gloo", "gloo:0.01", "notified:0.01")
NUMEL = 10_001  # the last bucket is a short one


def summed(communicator: Communicator, folder: str, machines: int) -> dict[str, list[Tensor]]:
    """Return each row's sum after each of three steps, on machines that are addresses here."""
    sys.path.insert(0, str(BENCHMARKS))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import exchanges

    addresses = [f"127.0.0.{1 + machine}" for machine in range(machines)]
    each = communicator.world_size // machines
    setting = exchanges.Setting(
        rank=communicator.rank,
        ranks=communicator.world_size,
        address=addresses[communicator.rank // each],
        ranks_by_address=dict.fromkeys(addresses, each),
        store=f"{folder}/store",
        rows=[],
        numel=NUMEL,
    )
    summands = exchanges.Summands(setting)
    sums: dict[str, list[Tensor]] = {row: [] for row in ROWS}
    for row in ROWS:
        variant = summands.make(row)
        for _ in range(3):
            variant.step()
            sums[row].append(variant.result()[0].clone())
            variant.finish()
    return sums


@pytest.mark.parametrize("machines", [2])
def test_all_rows_give_the_sum_of_the_ranks_values(tmp_path: object, machines: int) -> None:
    ranks = {3: 3, 2: 4}[machines]
    values = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    for sums in spawn(ranks, summed, str(tmp_path), machines):
        for row in ROWS:
            assert len(sums[row]) == 3
            for found in sums[row]:
                torch.testing.assert_close(found, torch.stack(values).sum(0))


@pytest.mark.parametrize("world", ["1", "2x0", "two"])
def test_a_world_that_is_none_is_refused(world: str) -> None:
    with benchmark("exchange.py", "--worlds", world) as process:
        _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 2
    assert f"{world!r} is neither a number of machines, 2 to 250, nor MACHINESxRANKS" in err
