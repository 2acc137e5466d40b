"""The end of a communicator: nobody is left waiting, and no thread outlives it."""

from __future__ import annotations

import psutil
import torch

from paceline.comm.communicator import Communicator, broadcast_all, total
from paceline.comm.single_rank import SingleRankCommunicator
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.processes.gloo_processes import spawn


def sum_and_end(c: Communicator) -> tuple[float, int]:
    """Return a sum, and how many threads ended with the communicator."""
    result = float(total(c, torch.ones(1000), "a sum")[-1])
    threads = psutil.Process().num_threads()
    c.end()
    return result, threads - psutil.Process().num_threads()


def test_gloos_threads_end_with_it() -> None:
    for result, ended in spawn(3, sum_and_end):
        assert result == 3
        assert ended > 0


def test_a_rank_that_ends_leaves_the_others_at_work() -> None:
    def end_first(c: Communicator) -> float:
        ticket = c.all_reduce(tensor := torch.ones(1))
        if c.rank == 0:
            ticket.wait("a sum")
            c.end()
        else:
            ticket.wait("a sum")
        return float(tensor)

    assert run_ranks(2, end_first) == [2, 2]


def test_a_rank_alone_has_its_own_sums() -> None:
    c = SingleRankCommunicator()
    tensor = torch.arange(3.0)
    assert total(c, tensor, "a sum").tolist() == [0, 1, 2]
    broadcast_all(c, [tensor], "a broadcast")
    c.steady()
    c.end()
    c.close()
    assert tensor.tolist() == [0, 1, 2]
