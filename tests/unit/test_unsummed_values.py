"""Values of steps that weren't summed when a snapshot was taken, sent again in a new generation."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from paceline.comm.communicator import Communicator
from paceline.snapshots.own_part import OwnPart, values_to_send
from tests.harness.equivalence.rank_threads import run_ranks

OWN = (1.0, 10.0, 100.0)  # of each rank, in step 4; a lost member had 1,000
SUM = 1111.0


def part(value: float) -> OwnPart:
    return OwnPart(state={}, sent={4: torch.tensor([value], dtype=torch.float64)})


@pytest.mark.parametrize("knowing", [(), (1,), (0, 2), (0, 1, 2)])
def test_the_ranks_send_what_adds_up_to_the_sum(knowing: tuple[int, ...]) -> None:
    def work(communicator: Communicator) -> Mapping[int, Tensor]:
        rank = communicator.rank
        totals = {4: torch.tensor([SUM], dtype=torch.float64)} if rank in knowing else {}
        copies = [] if knowing or rank else [part(1000.0)]  # with a sum, no copy is needed
        return values_to_send([part(OWN[rank]), *copies], totals, communicator)

    sent = run_ranks(3, work)
    assert sum(values[4].item() for values in sent) == SUM
    assert all(values.keys() == {4} for values in sent)
