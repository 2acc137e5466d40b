"""The equivalence of `tests/contract/test_equivalence.py` on real processes and Gloo."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import TCPStore

from paceline.comm.communicator import Communicator
from paceline.comm.process_group import ProcessGroupCommunicator
from tests.harness.equivalence.equivalence_cases import CASES
from tests.harness.equivalence.large_batch import State, Training, convnet, largest_difference
from tests.harness.processes.gloo_processes import spawn


def train(communicator: Communicator, training: Training, bucket_bytes: int) -> State:
    return training.on_rank(communicator, bucket_bytes)


@pytest.mark.parametrize(
    ("world_size", "bucket_bytes"), [(1, 2_000), (2, 1), (2, 10**9), (4, 2_000)]
)
def test_processes_train_as_one_process_does(world_size: int, bucket_bytes: int) -> None:
    torch.manual_seed(4)
    training = Training.of(convnet())
    alone = training.alone()
    states = spawn(world_size, train, training, bucket_bytes)
    for state in states:
        assert largest_difference(state, alone) < 1e-10
        assert largest_difference(state, states[0]) == 0


def train_all(communicator: Communicator, port: int) -> dict[str, State]:
    """Train every case of the grid, one after the other."""
    layers = ProcessGroupCommunicator(
        TCPStore("127.0.0.1", port, is_master=False),
        rank=communicator.rank,
        world_size=communicator.world_size,
        device=torch.device("cpu"),
        address="127.0.0.1",
        first_timeout=30,
        timeout=30,
    )
    return {
        name: make().on_rank(communicator, 2_000, layers=layers) for name, make in CASES.items()
    }


@pytest.mark.parametrize("world_size", [3])
def test_every_case_trains_as_one_process_does(world_size: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    states = spawn(world_size, train_all, store.port)
    for name, make in CASES.items():
        alone = make().alone()
        for of_rank in states:
            assert largest_difference(of_rank[name], alone) < 1e-10, name
            assert largest_difference(of_rank[name], states[0][name]) == 0, name


def test_two_runs_give_the_same_bits() -> None:
    torch.manual_seed(5)
    training = Training.of(convnet())
    one, other = (spawn(3, train, training, 2_000) for _ in range(2))
    assert largest_difference(one[0], other[0]) == 0
