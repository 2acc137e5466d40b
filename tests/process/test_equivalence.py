"""The equivalence of `tests/contract/test_equivalence.py` on real processes and Gloo."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.communicator import Communicator
from tests.harness.equivalence import Training, convnet, largest_difference
from tests.harness.processes import spawn


def train(communicator: Communicator, training: Training, bucket_bytes: int) -> object:
    return training.on_rank(communicator, bucket_bytes)


@pytest.mark.parametrize("bucket_bytes", [1, 2_000, 10**9])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_processes_train_as_one_process_does(world_size: int, bucket_bytes: int) -> None:
    torch.manual_seed(4)
    training = Training.of(convnet())
    alone = training.alone()
    states = spawn(world_size, train, training, bucket_bytes)
    for state in states:
        assert largest_difference(state, alone) < 1e-10
        assert largest_difference(state, states[0]) == 0


def test_two_runs_give_the_same_bits() -> None:
    torch.manual_seed(5)
    training = Training.of(convnet())
    one, other = (spawn(3, train, training, 2_000) for _ in range(2))
    assert largest_difference(one[0], other[0]) == 0
