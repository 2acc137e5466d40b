"""Models without memory get the values that they would have had, each stage its own."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.api.module_checks import require_supported_modules
from paceline.errors import ConfigError
from paceline.models.zoo import build_model
from paceline.parallel.cuts import block_costs
from paceline.parallel.cutting import cut_model
from paceline.parallel.deferred import deferred_init, values_of
from paceline.parallel.materialize import RESETS, materialize, record_resets
from paceline.parallel.pipeline import PipelineOptions
from tests.harness.equivalence.pipelines import PipelineRank, on_ranks
from tests.harness.processes.python_program import ROOT

transformer = runpy.run_path(str(ROOT / "examples/pipeline.py"))["transformer"]
CPU = torch.device("cpu")
Make = Callable[[], nn.Module]


def several_kinds() -> nn.Module:
    """Return a model whose constructor does what others do, in one."""
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
        nn.LSTM(3, 4, 2),
        nn.Embedding(5, 3, padding_idx=0),
        nn.Linear(3, 5),
        nn.BatchNorm1d(3),
    )
    model[5](torch.rand(8, 3))  # as an initialization by data does
    model[5].bias.data = torch.from_numpy(np.arange(3, dtype=np.float32))
    nn.init.trunc_normal_(model[3].weight, a=-0.5)  # reads values, to reject some
    nn.init.orthogonal_(model[4].weight)
    model.to(memory_format=torch.channels_last)
    rate = torch.linspace(0, 0.3, 4)[2].item()
    own = torch.Generator().manual_seed(5)
    given = torch.tensor(model[4].bias.tolist())
    given.mul_(torch.rand(5))  # which has memory
    read = torch.rand(3)
    real = torch.tensor([1.0, 2.0, 3.0])
    product = read * torch.ones(3).mul_(2).mul_(2) + real
    read.zero_()
    real.zero_()
    buffers = {
        "product": product,
        "other strides": torch.linalg.svd(torch.rand(3, 4))[2].contiguous(),  # than on meta
        "scaled": torch.arange(4.0).sin()[None].expand(2, 4) * rate,
        "given": given,
        "drawn": torch.randn(3, generator=own) + torch.randn(3, generator=own),
        "bits": torch.bernoulli(torch.rand(9)),
        "chosen": torch.rand(9).gt(0.5).nonzero(),
    }
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    return model.double()


def lazy() -> nn.Module:
    """Return a model whose shapes come with its first batch."""
    model = nn.Sequential(
        nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(3, bias=False)
    )
    model(torch.randn(2, 2, 8, 8))
    return model


def of_another_dtype() -> nn.Module:
    earlier = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    model = nn.Linear(3, 3)
    model.register_buffer("drawn", torch.rand(3))
    torch.set_default_dtype(earlier)
    return model


MODELS: dict[str, Make] = {
    "the example's transformer": lambda: transformer(32, 2, 16),
    "a ResNet": lambda: build_model("resnet20", num_labels=10, num_channels=3),
    "torch's transformer": lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
    "several kinds": several_kinds,
    "lazy modules": lazy,
    "another dtype": of_another_dtype,
}


@pytest.mark.parametrize("name", MODELS)
def test_each_tensor_has_the_values_of_the_constructor(name: str) -> None:
    torch.manual_seed(1)
    expected = MODELS[name]()
    after = torch.rand(3)
    torch.manual_seed(1)
    with deferred_init():
        model = MODELS[name]()
    assert torch.equal(torch.rand(3), after)
    assert all(p.is_meta for p in model.parameters())
    later = torch.get_rng_state()
    tensors = [*model.parameters(), *model.buffers()]
    materialize(model, tensors[1::2][::-1], CPU)  # each without the others, in any order
    materialize(model, tensors[::2], CPU)
    assert torch.equal(torch.get_rng_state(), later)
    found = model.state_dict()
    assert [*found] == [*expected.state_dict()]
    for key, value in expected.state_dict().items():
        assert torch.equal(found[key], value), key
        assert (found[key].dtype, found[key].stride()) == (value.dtype, value.stride()), key
    tied = dict(model.named_parameters()).keys() == dict(expected.named_parameters()).keys()
    assert tied  # what is shared is still listed once


class Filled(nn.Sequential):
    """A model with an attribute and a buffer, whose first and last weight are tied."""

    def __init__(self) -> None:
        layers = [nn.Linear(4, 4) for _ in range(4)]
        super().__init__(*layers)
        for number, p in enumerate(self.parameters()):
            nn.init.constant_(p, number)
        self[3].weight = self[0].weight
        self[3].weight.mark = "tied"  # type: ignore[attr-defined]
        self.register_buffer("scale", torch.arange(2.0))


def test_a_stage_has_its_own_values_alone() -> None:
    models = []
    for _ in range(3):
        with deferred_init():
            models.append(Filled())

    def run(rank: PipelineRank) -> dict[str, Tensor]:
        whole = models[rank.run.context.along("stage").rank]
        options = PipelineOptions(loss=F.cross_entropy, microbatches=3, cuts=["1", "3"])
        stage = cut_model(whole, rank.run, rank.sync, options, report=rank.said.append)
        assert not any(tensor.is_meta for tensor in stage.state_dict().values())
        for name, p in stage.named_parameters():
            assert hasattr(p, "mark") is (name in ("0.weight", "3.weight")), name
        assert not rank.said
        others = {*dict(whole.named_parameters())} - {*dict(stage.named_parameters()), "0.weight"}
        assert all(whole.get_parameter(name).is_meta for name in others)
        return stage.whole_state_dict()

    for found in on_ranks(run, 3):
        for key, value in Filled().state_dict().items():
            assert torch.equal(found[key], value), key


def test_blocks_without_values_are_timed_on_a_copy() -> None:
    with deferred_init():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    costs = block_costs(model, ["0", "1"], {}, torch.ones(2, 4))
    assert [cost.bytes for cost in costs] == [80, 80]
    assert all(cost.seconds for cost in costs)
    assert all(p.is_meta for p in model.parameters())


def test_a_model_of_the_meta_device_gets_the_values_of_reset_parameters() -> None:
    def make() -> nn.Module:
        layers = [nn.TransformerEncoderLayer(16, 2, 32), nn.TransformerDecoderLayer(16, 2, 32)]
        return nn.Sequential(*layers, nn.BatchNorm1d(3))

    torch.manual_seed(1)
    expected = make()
    with torch.device("meta"):
        model = make()
    torch.manual_seed(1)
    said: list[str] = []
    options = PipelineOptions(loss=F.cross_entropy, microbatches=1)
    (stage,) = on_ranks(
        lambda rank: cut_model(model, rank.run, rank.sync, options, report=said.append), 1
    )
    for key, value in expected.state_dict().items():
        assert torch.equal(stage.state_dict()[key], value), key
    assert RESETS in said


class Positions(nn.Module):
    """A module that holds a parameter and initializes it in its constructor alone."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize("reset", [False, True])
def test_a_module_that_gives_no_values_is_named(reset: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), Positions()))
    if reset:  # as torch's trunc_normal_ does on the meta device
        model[0][1].reset_parameters = lambda: None
    with pytest.raises(ConfigError, match=r"0\.1 \(Positions\) has places on the meta device"):
        record_resets(model)


@pytest.mark.parametrize("defers", [False, True])
def test_a_lazy_module_without_a_batch_is_refused(defers: bool) -> None:
    with deferred_init() if defers else nullcontext():
        model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))

    def run(rank: PipelineRank) -> str:
        with pytest.raises(ConfigError) as refused:
            rank.cut(model, F.cross_entropy, microbatches=2, cuts=["1"])
        return str(refused.value)

    for sentence in on_ranks(run, 2):
        assert sentence.startswith("1.weight is uninitialised (lazy): run one batch through")


def test_a_model_without_values_is_refused_where_there_are_no_stages() -> None:
    with deferred_init(), deferred_init():
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"weight without values.*paceline\.stages\(\) first"):
        require_supported_modules(model, torch.device("cpu"))
    assert values_of([model.weight])[0].isfinite().all()
