"""Weights that a script loads into a model that is averaged: training begins anew with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import paceline
from paceline.algorithms.synchronizer import Weights
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from paceline.update.outer.average import Average
from paceline.update.outer.bmuf import BMUF
from paceline.update.outer.diloco import DiLoCo
from paceline.update.outer.easgd import EASGD
from paceline.update.outer.mean import Mean
from paceline.update.outer.sparseloco import SparseLoCo
from tests.harness.equivalence.averaging import State, Task, Worker, net, on_ranks
from tests.harness.library.small_training import network, samples, sgd

RULES = [Mean(), EASGD(), BMUF(), DiLoCo(), SparseLoCo()]
CUTS = [[0, 4, 8]] * 12
Write = Callable[[nn.Module], object]


def plain_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.2)


# Made once: ranks are threads, which share torch's random stream.
OTHER: State = {n: v + 0.5 if v.is_floating_point() else v for n, v in net().state_dict().items()}


def other_net() -> nn.Module:
    model = net()
    model.load_state_dict(OTHER)
    return model


@torch.no_grad()
def copy(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        p.copy_(OTHER[name])


def copy_data(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        p.data.copy_(OTHER[name])


def load(model: nn.Module) -> None:
    model.load_state_dict(OTHER)


def merged_after(task: Task, write: Write = lambda model: None, before: int = 0) -> list[State]:
    """Train, and write the model of each rank before a step; return the merged weights."""

    def work(worker: Worker, _: Communicator) -> State:
        worker.train(range(before))
        write(worker.model)
        worker.train(range(before, len(task.cuts)))
        worker.replica.settle(Weights.MERGED)
        return worker.merged()

    return on_ranks(task, work)


def require_equal(one: State, other: State) -> None:
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("write", [load, copy, copy_data])
def test_weights_written_before_the_first_step_are_the_start(rule: Any, write: Write) -> None:
    average = Average(every=3, outer=rule, delay=0)
    options: dict[str, Any] = {"average": average, "cuts": CUTS, "make_optimizer": plain_sgd}
    (expected, _) = merged_after(Task(make_model=other_net, **options))
    for found in merged_after(Task(**options), write):
        parameters = [name for name in found if "running" not in name]
        require_equal({n: expected[n] for n in parameters}, found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(
    "rounds",
    [{"every": 3}, {"every": 4, "delay": 2}, {"every": 4, "fragments": 2, "delay": 1}],
    ids=str,
)
@pytest.mark.parametrize("wire", ["fp32", "topk:0.02"])
def test_weights_loaded_in_mid_run_stay_without_a_learning_rate(
    rule: Any, rounds: dict[str, Any], wire: str
) -> None:
    if rounds.get("delay") and not rule.allows_delay:
        rounds = {**rounds, "delay": 0}
    average = Average(outer=rule, **rounds)
    dtype = torch.float64 if wire == "fp32" else torch.float32
    task = Task(average=average, cuts=CUTS, wire=wire, dtype=dtype, make_optimizer=plain_sgd)

    def work(worker: Worker, _: Communicator) -> State:
        worker.train(range(5))  # a merge is under way where it has a delay
        load(worker.model)
        worker.model.eval()
        shown = worker.model.state_dict()
        require_equal(expected, {name: shown[name] for name in expected})
        worker.model.train()
        for group in worker.optimizer.param_groups:
            group["lr"] = 0.0
        worker.train(range(5, len(task.cuts)))
        worker.replica.settle(Weights.MERGED)
        return worker.merged()

    expected = {n: v.to(dtype) for n, v in OTHER.items() if "running" not in n}
    expected.pop("1.num_batches_tracked", None)
    for found in on_ranks(task, work):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("whole", [True, False], ids=["strict=False", "of the layer"])
def test_a_load_of_one_layer_leaves_the_others_to_the_merge(whole: bool) -> None:
    task = Task(average=Average(every=3, outer=DiLoCo(), delay=0), cuts=CUTS)
    weight = torch.full((4, 7), 0.25, dtype=torch.float64)

    def load_layer(model: nn.Module) -> None:
        if whole:
            model.load_state_dict({"4.weight": weight}, strict=False)
        else:
            model.get_submodule("4").load_state_dict({"weight": weight}, strict=False)

    def work(worker: Worker, _: Communicator) -> tuple[State, State]:
        worker.train(range(4))  # a step after the merge: the ranks' own weights differ
        load_layer(worker.model)
        shown = worker.merged()
        worker.train(range(4, len(task.cuts)))
        worker.replica.settle(Weights.MERGED)
        return shown, worker.merged()

    (one, last), (other, other_last) = on_ranks(task, work)
    assert torch.equal(one["4.weight"], weight)
    for name in one:
        if "running" not in name:
            assert torch.equal(one[name], other[name]), name
            assert torch.equal(last[name], other_last[name]), name


def test_parameters_that_a_load_replaces_are_refused() -> None:
    model = network()
    with paceline.join() as world:
        paceline.parallelize(model, sgd(model), world, sync="average:every=2")
        with pytest.raises(ConfigError, match=r"assign=True.*the optimizer has the earlier ones"):
            model.load_state_dict(network().state_dict(), assign=True)


def assign_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.ones_like(p)


def fill(model: nn.Module) -> None:
    nn.init.ones_(next(model.parameters()))


def show_and_hide(model: nn.Module) -> None:
    model.eval()
    model.state_dict()
    model.train()


def fill_and_show(model: nn.Module) -> None:
    fill(model)
    show_and_hide(model)


def load_same(model: nn.Module) -> None:
    model.load_state_dict(network().state_dict())


@pytest.mark.parametrize("between", [assign_data, fill, fill_and_show, show_and_hide, load_same])
def test_weights_that_are_written_in_mid_run_by_other_means_are_said(
    capsys: pytest.CaptureFixture[str], between: Write
) -> None:
    """They count as trained: a rule with momentum would repeat them, as in case 70."""
    model = network()
    with paceline.join() as world:
        _, optimizer = paceline.parallelize(model, sgd(model), world, sync="average:every=2")
        for number in range(6):
            with world.step():
                model(samples(4)[:][0]).sum().backward()
                optimizer.step()
            if number in (2, 3):
                between(model)
        world.merge()
    said = "written between two steps, other than by load_state_dict(): with sync"
    expected = between in (assign_data, fill, fill_and_show)
    assert capsys.readouterr().err.count(said) == expected


def test_a_world_that_closes_before_its_first_merge_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for every, merges in ((4, False), (4, True), (2, False)):
        model = network()
        with paceline.join() as world:
            _, optimizer = paceline.parallelize(
                model, sgd(model), world, sync=f"average:every={every}"
            )
            for _ in range(3):
                with world.step():
                    model(samples(4)[:][0]).sum().backward()
                    optimizer.step()
            if merges:
                world.merge()
        said = "after 3 steps, before the workers' first merge" in capsys.readouterr().err
        assert said is (every == 4 and not merges)
