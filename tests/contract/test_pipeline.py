"""Pipelines equal one process: stages, schedules, microbatches, optimizers, in float64."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.config.world import SyncConfig
from paceline.models.resnet import BasicBlock, ResNet
from paceline.parallel.cutting import BATCH_NORM
from tests.harness.equivalence.large_batch import largest_difference
from tests.harness.equivalence.pipelines import (
    MakeOptimizer,
    PipelineRank,
    on_ranks,
    train,
    train_alone,
)

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
WIDTH = 6
ALLREDUCE = SyncConfig(sync="allreduce")
CUTS = {1: [], 2: ["4"], 3: ["2", "5"], 4: ["1", "4", "6"]}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def mlp(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, *more, nn.Linear(WIDTH, 3)).double()


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, WIDTH, dtype=torch.float64, generator=random),
            torch.randint(0, 3, (n,), generator=random),
        )
        for n in sizes
    ]


def require_equal(
    model: nn.Module,
    stages: int,
    make_optimizer: MakeOptimizer = sgd,
    *,
    replicas: int = 1,
    data: Any = (),
    accumulates: int = 1,
    config: SyncConfig = ALLREDUCE,
    loss: Any = F.cross_entropy,
    **options: Any,
) -> list[Any]:
    """Train a model in a pipeline and in one process; compare losses and weights."""
    data = data or batches(12, 12, 12, 5)

    def run(rank: PipelineRank) -> Any:
        stage = rank.cut(model, loss, **options)
        return train(rank, stage, make_optimizer, data, config, accumulates)

    results = on_ranks(run, stages, replicas)
    microbatches = options["microbatches"]
    losses, state = train_alone(model, loss, make_optimizer, data, microbatches, accumulates)
    for own, found in results:
        assert [*found] == [*state]
        assert largest_difference(found, state) < 1e-10
        if replicas == 1:
            assert own == pytest.approx(losses, abs=1e-10)
    return results


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", CUTS)
@pytest.mark.parametrize("each", [1, 1.5, 4])
def test_stages_equal_one_process(schedule: str, stages: int, each: float) -> None:
    microbatches = int(stages * each)
    data = batches(16, 16, 5) if each == 4 else batches(12, 12, 12, 5)
    options = {"cuts": CUTS[stages], "schedule": schedule, "microbatches": microbatches}
    require_equal(mlp(), stages, adamw if each == 1.5 else sgd, data=data, **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_of_several_batches_accumulate(schedule: str) -> None:
    options = {"microbatches": 2, "cuts": ["3"], "schedule": schedule}
    require_equal(mlp(), 2, replicas=2, data=batches(8, 8, 6, 6), accumulates=2, **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_sent_in_the_last_backward(schedule: str) -> None:
    ((x, y),) = batches(8)

    def run(rank: PipelineRank) -> list[int]:
        options = {"microbatches": 2, "cuts": ["4"], "schedule": schedule}
        stage = rank.cut(mlp(), F.cross_entropy, **options)
        optimizer = sgd([*stage.parameters()])
        replica = rank.bind(stage, optimizer, ALLREDUCE)
        sent = []
        for number in range(2):
            replica.begin(number, 0.5)
            with replica.no_sync():
                stage.train_batch(x, y)
            stage.train_batch(x, y)
            gradients = replica._binding.gradients
            sent.append(sum(gradients.arrived(n) for n in range(len(gradients.names))))
            optimizer.step()
            optimizer.zero_grad()
            replica.end()
        replica.close()
        return sent

    for sent in on_ranks(run, 2, 2):
        assert sent[0] == 0  # the first step traces which modules read what
        assert sent[1] > 0


def test_a_batch_that_is_smaller_than_the_microbatches_trains_one_sample_each() -> None:
    require_equal(mlp(), 3, data=batches(9, 2, 1, 12), microbatches=4, cuts=["2", "4"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_are_computed_again_where_they_are_checkpointed(schedule: str) -> None:
    options = {"microbatches": 3, "cuts": ["4"], "schedule": schedule}
    model = mlp(nn.BatchNorm1d(WIDTH))  # whose statistics a second forward must not change
    data = batches(12, 12, 9)
    require_equal(model, 2, data=data, checkpoint_activations=True, **options)


class Tied(nn.Sequential):
    """A model whose first and last layer share a weight."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        middle = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
        super().__init__(nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, WIDTH))
        self[4].weight = self[0].weight
        self.double()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("cuts", [["2"], ["1", "3"]])
def test_tied_weights_are_summed_over_their_stages(schedule: str, cuts: list[str]) -> None:
    options = {"microbatches": 3, "cuts": cuts, "schedule": schedule}
    results = require_equal(Tied(), len(cuts) + 1, **options)
    for _, state in results:
        assert torch.equal(state["0.weight"], state["4.weight"])


class Unused(nn.Module):
    """A model one of whose children doesn't run, and one of whose layers gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.spare = nn.Linear(2, 2)
        self.head = nn.Linear(WIDTH, 3)
        self.head.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_blocks_that_dont_run_stay_as_they_are() -> None:
    options = {"microbatches": 2, "cuts": ["body.2"], "blocks": ["body", "head"]}
    require_equal(Unused(), 2, **options)


class Frozen(nn.Sequential):
    """A model whose first stage trains nothing."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
        self.double()
        self[0].weight.requires_grad_(False)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_frozen_weight_stays(schedule: str) -> None:
    require_equal(Frozen(), 2, microbatches=2, cuts=["1"], schedule=schedule)


class Pair(nn.Module):
    """A block that returns two tensors, one without a gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), (x.detach() > 0).long()


class Chosen(nn.Module):
    """A block that gets them."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * (1 + pair[1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tuples_of_tensors_travel(schedule: str) -> None:
    model = mlp(Pair(), Chosen(), nn.Linear(WIDTH, WIDTH).double())
    require_equal(model, 2, microbatches=2, cuts=["9"], schedule=schedule)


def resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet(BasicBlock, (1, 2), num_labels=3, num_channels=3, small=True).double()


def images(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 3, 8, 8, dtype=torch.float64, generator=random),
            torch.randint(0, 3, (n,), generator=random),
        )
        for n in sizes
    ]


@pytest.mark.parametrize("cuts", [["layer2"], ["bn1"], ["layer2.1"], ["layer1", "fc"]])
def test_a_resnet_is_cut_at_its_layers_and_batch_norm_follows_the_microbatches(
    cuts: list[str],
) -> None:
    require_equal(resnet(), len(cuts) + 1, data=images(8, 8, 6), microbatches=4, cuts=cuts)


def test_a_model_with_batch_norm_is_told_its_rule_once() -> None:
    def run(rank: PipelineRank) -> list[str]:
        rank.cut(resnet(), F.cross_entropy, microbatches=2, cuts=["layer2"])
        rank.cut(mlp(), F.cross_entropy, microbatches=2, cuts=["4"])
        return rank.said

    assert on_ranks(run, 2) == [[BATCH_NORM], []]


def test_the_same_run_gives_the_same_bits() -> None:
    options = {"microbatches": 4, "cuts": ["2", "4"], "schedule": "1f1b"}
    first = require_equal(mlp(), 3, **options)
    second = require_equal(mlp(), 3, **options)
    for (losses, state), (again, other) in zip(first, second, strict=True):
        assert losses == again
        assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "config",
    [
        ALLREDUCE,
        SyncConfig(sync="notified", bucket_mb=0.0001),
        SyncConfig(sync="notified", update="sharded", bucket_mb=0.0001),
    ],
    ids=["allreduce", "notified", "sharded"],
)
def test_stages_and_replicas_equal_one_process(config: SyncConfig, schedule: str) -> None:
    data = batches(12, 12, 8)
    options = {"microbatches": 2, "cuts": ["4"], "schedule": schedule}
    require_equal(mlp(), 2, adamw, replicas=2, data=data, config=config, **options)


@pytest.mark.parametrize("sync", ["allreduce", "notified"])
def test_tied_weights_are_summed_before_their_exchange(sync: str) -> None:
    options = {"microbatches": 2, "cuts": ["2"], "config": SyncConfig(sync=sync)}
    require_equal(Tied(), 2, replicas=2, data=batches(12, 12, 8), **options)


def test_an_evaluation_returns_the_output_on_every_stage() -> None:
    ((x, _),) = batches(7)
    model = mlp()

    def run(rank: PipelineRank) -> Tensor:
        stage = rank.cut(model, F.cross_entropy, microbatches=3, cuts=["4"])
        output = stage.eval()(x)
        assert not output.requires_grad
        return output

    for output in on_ranks(run, 2):
        torch.testing.assert_close(output, model(x), rtol=0, atol=1e-12)


def test_gradients_are_clipped_by_the_norm_over_all_stages() -> None:
    ((x, y),) = batches(8)
    model = Tied()
    before = copy.deepcopy(model)
    F.cross_entropy(model(x), y % 3).backward()
    highest = nn.utils.get_total_norm((p.grad for p in model.parameters()), math.inf)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    def run(rank: PipelineRank) -> tuple[list[Tensor], dict[str, Tensor]]:
        stage = rank.cut(before, F.cross_entropy, microbatches=2, cuts=["2"])
        optimizer = sgd([*stage.parameters()])
        replica = rank.bind(stage, optimizer, ALLREDUCE)
        replica.begin(0, 1.0)
        stage.train_batch(x, y % 3)
        gradients = [p.grad for p in stage.parameters()]
        found = [nn.utils.get_total_norm(gradients, math.inf)]
        found.append(nn.utils.clip_grad_norm_(stage.parameters(), 0.01))
        gradients = {name: p.grad.clone() for name, p in stage.named_parameters()}
        replica.close()
        return found, gradients

    for found, gradients in on_ranks(run, 2):
        assert [each.item() for each in found] == pytest.approx(
            [highest.item(), norm.item()], abs=1e-10
        )
        for name, gradient in gradients.items():
            whole = model.get_parameter(name).grad
            torch.testing.assert_close(gradient, whole, rtol=0, atol=1e-10)


def test_what_travels_has_the_dtype_that_autocast_gives_it() -> None:
    model = mlp().float()
    data = [(x.float(), y) for x, y in batches(12, 12)]
    autocast = torch.autocast("cpu", torch.bfloat16)
    with autocast:
        losses, state = train_alone(model, F.cross_entropy, sgd, data, 4)

    def run(rank: PipelineRank, schedule: str) -> Any:
        stage = rank.cut(model, F.cross_entropy, microbatches=4, cuts=CUTS[2], schedule=schedule)
        with autocast:
            return train(rank, stage, sgd, data, ALLREDUCE)

    for schedule in SCHEDULES:
        for own, found in on_ranks(lambda rank, of=schedule: run(rank, of), 2):
            assert own == pytest.approx(losses, abs=1e-6)
            assert largest_difference(found, state) < 1e-6
