"""Plans of tensor parallelism, and the mistakes in them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import paceline
from paceline import ConfigError, World
from paceline.parallel import dividing
from paceline.parallel.plans import read_plan


@pytest.fixture
def world() -> Iterator[World]:
    """A world of this process alone."""
    with paceline.join() as world:
        yield world


class Conv1D(nn.Module):
    """As GPT-2's in Hugging Face's transformers, whose weight is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(4, 12).weight.T.clone())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 4)
        self.down_proj = nn.Linear(8, 4)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])


class ForCausalLM(nn.Module):
    """A model with the attributes by which Hugging Face's Llama states its plan."""

    base_model_prefix = "model"
    _tp_plan = {"lm_head": "colwise_rep"}  # noqa: RUF012

    def __init__(self, plan: dict[str, str] | None) -> None:
        super().__init__()
        self.config = SimpleNamespace(base_model_tp_plan=plan)
        self.model = Base()
        self.lm_head = nn.Linear(4, 16)


def test_a_hugging_face_models_own_plan_is_read() -> None:
    plan = {"layers.*.q_proj": "colwise", "layers.*.down_proj": "rowwise"}
    styles = read_plan(ForCausalLM(plan), None)
    assert {path: type(style) for path, style in styles.items()} == {
        "model.layers.*.q_proj": ColwiseParallel,
        "model.layers.*.down_proj": RowwiseParallel,
        "lm_head": ColwiseParallel,
    }


def test_the_transformers_plan_divides_its_feed_forward_parts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 16), nn.LayerNorm(4))
    styles = read_plan(model, "transformer")
    assert {path: type(style) for path, style in styles.items()} == {
        "1.linear1": ColwiseParallel,
        "1.linear2": RowwiseParallel,
    }


def test_a_users_own_styles_are_passed_through() -> None:
    style = ColwiseParallel(use_local_output=False)
    assert read_plan(nn.Sequential(nn.Linear(4, 4)), {"*": style}) == {"*": style}


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (ForCausalLM(None), None, "no plan was given, and ForCausalLM has none of its own"),
        (nn.Sequential(nn.Linear(4, 4)), {"1": "colwise"}, "'1', which is no module .* are '0'"),
        (nn.Sequential(nn.Linear(4, 4)), {"0": "rows"}, "'rows' for '0'; it must be one of colw"),
        (nn.Sequential(nn.Linear(4, 4)), "llama", "plan is 'llama'; it must be 'transformer'"),
        (nn.Sequential(nn.Linear(4, 4)), "transformer", "but Sequential has none: pass styles"),
        (nn.Sequential(Conv1D()), {"0": "colwise"}, r"^0 is a Conv1D, but .* Linear and Embedding"),
        (
            nn.TransformerEncoderLayer(4, 2, 16),
            {"self_attn.out_proj": "rowwise"},
            r"^self_attn\.out_proj is a part of nn\.MultiheadAttention",
        ),
    ],
)
def test_a_plan_that_does_not_fit(world: World, model: nn.Module, plan: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        paceline.tensor_parallel(model, world, plan)


def test_a_model_of_one_tensor_rank_stays_whole(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    kind = type(model[0])
    assert paceline.tensor_parallel(model, world, {"0": "colwise"}) is model
    assert type(model[0]) is kind


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of two ranks, of which the other one never answers."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_tied_weights_that_a_plan_separates(mesh: Any) -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    tied = [*dividing._names(model).values()]
    assert not [*dividing._faults(model, tied, 2)]
    parallelize_module(model, mesh, {"0": RowwiseParallel()}, src_data_rank=None)
    (fault,) = dividing._faults(model, tied, 2)
    assert fault.startswith("0.weight and 1.weight are one parameter")


@pytest.mark.parametrize(("width", "fits"), [(6, True), (5, False)])
def test_a_width_that_the_ranks_do_not_divide(mesh: Any, width: int, fits: bool) -> None:
    model = nn.Linear(4, width)
    parallelize_module(model, mesh, ColwiseParallel(), src_data_rank=None)
    faults = [*dividing._faults(model, (), 2)]
    assert len(faults) == (0 if fits else 2)  # the weight's and the bias's
    assert fits or "weight has the shape (5, 4), of which 2 tensor ranks" in faults[0]
