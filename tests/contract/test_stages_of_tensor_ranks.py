"""Stages of tensor ranks equal one process: the same mesh divides blocks, layers and batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]  # its stub lacks it
    _set_thread_isolation_mode,
)
from torch.nn import functional as F

from paceline.config.world import SyncConfig
from paceline.errors import CommError, ConfigError
from paceline.parallel.dividing import divide
from paceline.parallel.stage import Stage
from tests.harness.equivalence.large_batch import largest_difference
from tests.harness.equivalence.pipelines import (
    MakeOptimizer,
    PipelineRank,
    on_ranks,
    train,
    train_alone,
)

WIDTH = 6
PLAN = {"*.*.up": "colwise", "layers.*.down": "rowwise"}
OPTIONS: dict[str, Any] = {"microbatches": 4, "cuts": ["layers.1"]}
ALLREDUCE = SyncConfig(sync="allreduce")
NOTIFIED = SyncConfig(sync="notified", bucket_mb=0.0001)
SHARDED = SyncConfig(sync="notified", update="sharded", bucket_mb=0.0001)


@pytest.fixture(autouse=True)
def _groups_of_threads() -> Iterator[None]:
    """Let torch's registry of groups have those of each thread, which is a rank here."""
    _set_thread_isolation_mode(True)
    yield
    _set_thread_isolation_mode(False)


class Layer(nn.Module):
    """Layer of a feed-forward model, whose parts divide."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.up(self.before(x)).tanh())
        return result


class Model(nn.Module):
    """Model whose first weight may be the last one's, too, and with a block that doesn't run."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.last = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(2, 2)
        if tied:
            self.last.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.layers(self.first(x)))
        return result


BLOCKS = ["first", "layers", "last"]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, WIDTH, dtype=torch.float64, generator=random),
            torch.randint(0, WIDTH, (n,), generator=random),
        )
        for n in sizes
    ]


def cut(rank: PipelineRank, model: nn.Module, plan: Any = PLAN, **options: Any) -> Stage:
    """Return this rank's stage of a model, divided among its tensor ranks."""
    stage = rank.cut(model, F.cross_entropy, **{**OPTIONS, "blocks": BLOCKS, **options})
    divide(stage, rank.run, plan)
    return stage


def require_equal(
    mesh: tuple[int, int, int],
    make_optimizer: MakeOptimizer = sgd,
    *,
    config: SyncConfig = ALLREDUCE,
    tied: bool = False,
    plan: Any = PLAN,
    accumulates: int = 1,
    **options: Any,
) -> None:
    """Train in a mesh of so many stages, replicas and tensor ranks, and in one process."""
    model = Model(tied=tied)
    data = batches(12, 12, 9) if accumulates == 1 else batches(12, 12, 9, 9)
    stages, replicas, tensor = mesh

    def run(rank: PipelineRank) -> Any:
        stage = cut(rank, model, plan, **options)
        for name, p in stage.named_parameters():
            if ".up." in name:
                assert p.numel() * tensor == model.get_parameter(name).numel()
        return train(rank, stage, make_optimizer, data, config, accumulates)

    losses, state = train_alone(model, F.cross_entropy, make_optimizer, data, 4, accumulates)
    results = on_ranks(run, stages, replicas, tensor)
    assert len(results) == stages * replicas * tensor
    for own, found in results:
        assert [*found] == [*state]
        assert largest_difference(found, state) < 1e-10
        if replicas == 1:
            assert own == pytest.approx(losses, abs=1e-10)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_stages_of_two_tensor_ranks_equal_one_process(
    schedule: str, make_optimizer: MakeOptimizer
) -> None:
    require_equal((2, 1, 2), make_optimizer, schedule=schedule)


@pytest.mark.parametrize("config", [ALLREDUCE, NOTIFIED, SHARDED], ids=str)
def test_replicas_of_them_equal_one_process(config: SyncConfig) -> None:
    require_equal((2, 2, 2), adamw, config=config)


@pytest.mark.parametrize("config", [ALLREDUCE, NOTIFIED, SHARDED], ids=str)
def test_gradients_of_several_batches_accumulate_in_replicas_of_them(config: SyncConfig) -> None:
    require_equal((2, 2, 2), adamw, config=config, tied=True, accumulates=2, schedule="zb-h1")


def test_three_stages_of_three_tensor_ranks_equal_one_process() -> None:
    require_equal((3, 1, 3), cuts=["layers.1", "last"])


@pytest.mark.parametrize("checkpoints", [False, True])
def test_tied_weights_that_are_whole_are_summed_over_their_stages(checkpoints: bool) -> None:
    require_equal((2, 1, 2), tied=True, schedule="zb-h1", checkpoint_activations=checkpoints)


def test_a_cut_between_divided_layers_sends_what_each_tensor_rank_has() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)]
    model = nn.Sequential(*layers).double()
    plan = {"0": "colwise", "2": "rowwise"}
    data = batches(12, 9)

    def run(rank: PipelineRank) -> Any:
        stage = rank.cut(model, F.cross_entropy, microbatches=4, cuts=["2"])
        divide(stage, rank.run, plan)
        return train(rank, stage, sgd, data, ALLREDUCE)

    losses, state = train_alone(model, F.cross_entropy, sgd, data, 4)
    for own, found in on_ranks(run, 2, 1, 2):
        assert own == pytest.approx(losses, abs=1e-10)
        assert largest_difference(found, state) < 1e-10


def test_gradients_are_clipped_by_the_norm_over_stages_and_tensor_ranks() -> None:
    ((x, y),) = batches(8)
    model = Model(tied=True)
    before = copy.deepcopy(model)
    F.cross_entropy(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    def run(rank: PipelineRank) -> tuple[Tensor, dict[str, Tensor]]:
        stage = cut(rank, before)
        optimizer = sgd([*stage.parameters()])
        replica = rank.bind(stage, optimizer, ALLREDUCE)
        replica.begin(0, 1.0)
        stage.train_batch(x, y)
        found = nn.utils.clip_grad_norm_(stage.parameters(), 0.01)
        gradients = {
            name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None
        }
        replica.close()
        return found, gradients

    for number, (found, gradients) in enumerate(on_ranks(run, 2, 1, 2)):
        assert found.item() == pytest.approx(norm.item(), abs=1e-10)
        for name, gradient in gradients.items():
            whole = model.get_parameter(name).grad
            assert whole is not None
            for dim, size in enumerate(gradient.shape):
                if size != whole.shape[dim]:
                    whole = whole.chunk(2, dim)[number % 2]
            torch.testing.assert_close(gradient, whole, rtol=0, atol=1e-10)


def test_an_evaluation_returns_the_output_on_every_rank() -> None:
    ((x, _),) = batches(7)
    model = Model()

    def run(rank: PipelineRank) -> Tensor:
        return cut(rank, model).eval()(x)

    for output in on_ranks(run, 2, 1, 2):
        torch.testing.assert_close(output, model(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("trains", [True, False])
def test_an_output_of_which_each_tensor_rank_has_a_part_is_refused(trains: bool) -> None:
    ((x, y),) = batches(8)

    def run(rank: PipelineRank) -> str:
        stage = cut(rank, Model(), {**PLAN, "last": "colwise"})
        rank.bind(stage, sgd([*stage.parameters()]), ALLREDUCE).begin(0, 1.0)
        try:
            stage.train_batch(x, y % 3) if trains else stage(x)
        except ConfigError as error:
            rank.run.context.abort()
            return str(error)
        except CommError:
            return ""
        return "no error"

    assert {*on_ranks(run, 2, 1, 2)} - {""} == {
        "the last stage returns the shapes [(2, 3)], but the whole model [(2, 6)]: let the plan's "
        "last layer return all of its output on each tensor rank, as 'colwise_rep' does."
    }


def refusal_of(plan: Any, model: nn.Module, **options: Any) -> str:
    """Return the sentence that all ranks refuse a plan with."""

    def run(rank: PipelineRank) -> str:
        with pytest.raises(ConfigError) as refused:
            cut(rank, model, plan, **options)
        return str(refused.value)

    (sentence,) = set(on_ranks(run, 2, 1, 2))
    return sentence


def test_a_plan_is_the_whole_models_and_is_refused_on_all_stages() -> None:
    assert "'layers.*.middle', which is no module of the model" in refusal_of(
        {**PLAN, "layers.*.middle": "colwise"}, Model()
    )
    assert "layers.0.before is a LayerNorm" in refusal_of({"layers.0.before": "rowwise"}, Model())
    odd = Model()
    odd.last = nn.Linear(WIDTH, 3).double()
    assert "last.weight has the shape (3, 6), of which 2 tensor ranks don't divide dimension 0" in (
        refusal_of({"last": "colwise"}, odd)
    )
    sentence = refusal_of({**PLAN, "last": "colwise_rep"}, Model(tied=True))
    assert sentence == (
        "first.weight and last.weight are one parameter, which the plan would separate: leave all "
        "its modules out of the plan."
    )


def test_the_values_are_those_of_the_first_tensor_rank() -> None:
    given = Model()
    zeros = copy.deepcopy(given)
    nn.utils.vector_to_parameters(torch.zeros(10_000).double(), zeros.parameters())

    def run(rank: PipelineRank) -> dict[str, Tensor]:
        own = zeros if rank.run.context.along("tensor").rank else given
        return cut(rank, copy.deepcopy(own)).whole_state_dict()

    for state in on_ranks(run, 2, 1, 2):
        assert largest_difference(state, given.state_dict()) == 0


def test_a_model_that_is_divided_already_isnt_cut() -> None:
    def run(rank: PipelineRank) -> str:
        model = Model()
        divide(model, rank.run, PLAN)
        with pytest.raises(ConfigError) as refused:
            rank.cut(model, F.cross_entropy, **OPTIONS)
        return str(refused.value)

    for sentence in on_ranks(run, 2, 1, 2):
        assert "call paceline.stages() first, and then paceline.tensor_parallel()" in sentence
