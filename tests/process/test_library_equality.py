"""Loops of the library on several processes equal plain torch on whole batches, to ten digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.equivalence.large_batch import largest_difference
from tests.harness.library.small_training import loss_of, network, plain_step, samples, sgd
from tests.harness.library.small_training import whole_batches as batches
from tests.harness.library.training_loops import (
    CASES,
    LOOPS,
    accumulated_alone,
    run_loops,
    train_all,
)
from tests.harness.network.ports import free_ports
from tests.harness.processes.gloo_processes import spawn

WORLDS = (1, 3)
LIMIT = 1e-10


@pytest.fixture(scope="module", params=WORLDS)
def trained(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Tensor]]]:
    """All cases' models, a rank each."""
    return spawn(request.param, train_all, free_ports(len(CASES)))


@pytest.fixture(scope="module", params=WORLDS)
def looped(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """All loops' results, a rank each."""
    return spawn(request.param, run_loops, free_ports(len(LOOPS)))


@pytest.mark.parametrize("name", CASES)
def test_a_loop_trains_as_plain_torch_does(
    name: str, trained: list[dict[str, dict[str, Tensor]]]
) -> None:
    expected = CASES[name].alone()
    for states in trained:
        assert largest_difference(states[name], expected) < LIMIT
        assert largest_difference(states[name], trained[0][name]) == 0


def test_accumulation_over_batches_of_the_loader(looped: list[dict[str, Any]]) -> None:
    for results in looped:
        assert largest_difference(results["accumulated"], accumulated_alone()) < LIMIT


def test_a_loop_counts_samples_itself(looped: list[dict[str, Any]]) -> None:
    model = network()
    optimizer = sgd(model)
    for x, y in batches(samples(), 0):
        plain_step(model, x, y, optimizer, None)
    for results in looped:
        assert largest_difference(results["counted"], model.state_dict()) < LIMIT


def test_ranks_that_count_nothing_count_the_same(looped: list[dict[str, Any]]) -> None:
    model = network()
    optimizer = sgd(model)
    x, y = samples(12)[:]
    for _ in range(4):
        plain_step(model, x, y, optimizer, None)
    for results in looped:
        assert largest_difference(results["uncounted"], model.state_dict()) < LIMIT


def test_an_average_of_weights_after_settle_and_its_evaluation(
    looped: list[dict[str, Any]],
) -> None:
    model = network()
    optimizer = sgd(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    for x, y in batches(samples(), 0):
        plain_step(model, x, y, optimizer, None)
        average.update_parameters(model)
    with torch.no_grad():
        expected = loss_of(average, *samples(25)[:])
    for results in looped:
        state, loss, seen = results["averaged"]
        assert largest_difference(state, average.module.state_dict()) < LIMIT
        assert abs(loss - float(expected)) < LIMIT
        assert seen == 25


def test_all_ranks_get_the_state_of_rank_0s_optimizer(looped: list[dict[str, Any]]) -> None:
    model = network()
    optimizer = sgd(model)
    plain_step(model, *samples(7)[:], optimizer, None)
    for x, y in batches(samples(), 0):
        plain_step(model, x, y, optimizer, None)
    for results in looped:
        assert largest_difference(results["warm"], model.state_dict()) < LIMIT
