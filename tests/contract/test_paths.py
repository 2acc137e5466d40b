"""A model that takes another path after its first step computes with the newest parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.communicator import Communicator
from tests.harness.equivalence.large_batch import replicate
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step

STEPS, BATCH = 5, 12


class Dropped(nn.Module):
    """Three layers of attention, of which the first step leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if self.calls or number != 1:
                x = x + layer(x, x, x, need_weights=False)[0]
        self.calls += 1
        scores: Tensor = self.head(x.mean(1))
        return scores


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups = [[p for n, p in named if ("bias" in n) is biases] for biases in (False, True)]
    return torch.optim.SGD([{"params": group} for group in groups], lr=0.1, momentum=0.9)


def batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(BATCH, 5, 8, dtype=torch.float64, generator=random),
            torch.randint(0, 4, (BATCH,), generator=random),
        )
        for _ in range(STEPS)
    ]


@pytest.mark.parametrize("bucket_bytes", [100, 2_000, 1_000_000])
def test_a_layer_that_the_first_step_drops_reads_what_it_should(bucket_bytes: int) -> None:
    torch.manual_seed(3)
    model = Dropped().double()

    def alone() -> dict[str, Tensor]:
        own = copy.deepcopy(model)
        optimizer = optimizer_of(own)
        for x, y in batches():
            F.cross_entropy(own(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return own.state_dict()

    def on_rank(communicator: Communicator) -> dict[str, Tensor]:
        own = copy.deepcopy(model)
        optimizer = optimizer_of(own)
        replica = replicate(own, optimizer, communicator, bucket_bytes)
        part = slice(communicator.rank, None, communicator.world_size)
        for number, (x, y) in enumerate(batches()):
            with replica_step(replica, number, 1 / communicator.world_size):
                F.cross_entropy(own(x[part]), y[part]).backward()
                optimizer.step()
                optimizer.zero_grad()
        return own.state_dict()

    expected = alone()
    for state in run_ranks(2, on_rank):
        for name, value in state.items():
            assert torch.allclose(value, expected[name], rtol=0, atol=1e-10), name
