"""BatchNorm over all ranks: dtypes, layouts, what is kept of the model, and what is refused.

That it equals the whole batch's to 1e-10, with uneven and empty shares, is in the grid of
`test_equivalence.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from paceline.comm.communicator import Communicator
from paceline.errors import CommTimeout, ConfigError
from paceline.update.batch_norm import (
    BatchShare,
    RunningStatistics,
    SyncBatchNorm,
    batch_norms,
    convert_sync_batchnorm,
)
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.processes.worlds import run_of
from tests.harness.twins.communicator import ThreadCommunicator, ThreadGroup

SHAPE = (9, 4, 5, 6)
CUTS = ((0, 4), (4, 9))  # of a batch of 9, on two ranks


def share_of(first: int, last: int, whole: int) -> BatchShare:
    share = BatchShare()
    share.begin((last - first) / whole)
    return share


def alone_and_together(
    layer: nn.Module, x: Tensor, upstream: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return output, gradients and statistics of the whole batch, by one process and by two."""
    reference = copy.deepcopy(layer).double()
    inputs = x.to(torch.float64, copy=True).requires_grad_()
    output = reference(inputs)
    (output * upstream.double()).sum(list(range(1, x.dim()))).mean().backward()
    expected = {"output": output.detach(), "input": _gradient(inputs)}
    expected |= {name: _gradient(p) for name, p in trained(reference)}
    expected |= dict(reference.named_buffers())

    def run(communicator: Communicator) -> dict[str, Tensor]:
        first, last = CUTS[communicator.rank]
        share = share_of(first, last, len(x))
        own = convert_sync_batchnorm(copy.deepcopy(layer), run_of(communicator), share)
        inputs = x[first:last].clone(memory_format=torch.preserve_format).requires_grad_()
        output = own(inputs)
        (output * upstream[first:last]).sum(list(range(1, x.dim()))).mean().backward()
        result = {"output": output.detach(), "input": _gradient(inputs) * share.weight}
        result |= {name: _gradient(p) * share.weight for name, p in trained(own)}
        return result | dict(own.named_buffers())

    one, other = run_ranks(2, run)
    together = {name: torch.cat([one[name], other[name]]) for name in ("output", "input")}
    together |= {name: one[name] + other[name] for name, _ in trained(layer)}
    together |= {name: one[name] for name, _ in layer.named_buffers()}
    return expected, together


def trained(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in layer.named_parameters() if p.requires_grad]


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad.detach()


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)],
)
@pytest.mark.parametrize("weights", ["float weights", "weights of the input's dtype"])
def test_every_dtype_has_its_own_accuracy(
    dtype: torch.dtype, tolerance: float, weights: str
) -> None:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(4)
    nn.init.uniform_(layer.weight, 0.5, 2)
    layer.to(dtype if weights != "float weights" or dtype is torch.float64 else torch.float32)
    x, upstream = torch.randn(SHAPE, dtype=dtype) + 3, torch.randn(SHAPE, dtype=dtype)
    expected, together = alone_and_together(layer, x, upstream)
    assert together["output"].dtype is together["input"].dtype is dtype
    for name, value in expected.items():
        scale = float(value.double().abs().max())
        torch.testing.assert_close(
            together[name].double(), value.double(), rtol=0, atol=tolerance * max(scale, 1)
        )


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_parameter_gets_no_gradient_and_the_other_its_own(frozen: str) -> None:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(4)
    layer.get_parameter(frozen).requires_grad_(False)
    expected, together = alone_and_together(layer, torch.randn(SHAPE), torch.randn(SHAPE))
    (other,) = {"weight", "bias"} - {frozen}
    torch.testing.assert_close(together[other].double(), expected[other], rtol=0, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_statistics_are_stable_far_from_zero(offset: float) -> None:
    torch.manual_seed(0)
    x, upstream = torch.randn(9, 4) + offset, torch.zeros(9, 4)
    expected, together = alone_and_together(nn.BatchNorm1d(4, momentum=1.0), x, upstream)
    torch.testing.assert_close(
        together["running_var"].double(), expected["running_var"], rtol=1e-4, atol=0
    )


def test_channels_last_stays_channels_last() -> None:
    def run(communicator: Communicator) -> None:
        layer = convert_sync_batchnorm(nn.BatchNorm2d(4), run_of(communicator), BatchShare())
        x = torch.randn(SHAPE).to(memory_format=torch.channels_last).requires_grad_()
        output = layer(x)
        output.backward(torch.randn_like(output))
        assert output.is_contiguous(memory_format=torch.channels_last)
        assert _gradient(x).is_contiguous(memory_format=torch.channels_last)

    run_ranks(2, run)


class Fussy(nn.Module):
    """A model with BatchNorms in odd places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(3)
        self.body = nn.ModuleDict({"deep": nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))})
        self.twice = self.body["deep"][1]  # type: ignore[index]
        self.theirs = nn.SyncBatchNorm(3)
        self.not_one = nn.InstanceNorm2d(3, affine=True)


def test_names_parameters_buffers_hooks_and_modes_are_kept() -> None:
    model: Any = Fussy()
    model.first.eval()
    calls: list[str] = []
    model.first.register_forward_hook(lambda *_: calls.append("hook"))
    parameters, names = list(model.parameters()), list(model.state_dict())
    communicator = ThreadGroup(1).communicator(0)
    converted: Any = convert_sync_batchnorm(model, run_of(communicator), BatchShare())
    assert converted is model
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    kinds = [type(m) for m in (model.first, model.twice, model.theirs)]
    assert kinds == [SyncBatchNorm] * 3
    assert model.twice is model.body["deep"][1]
    assert type(model.not_one) is nn.InstanceNorm2d
    assert not model.first.training
    assert model.theirs.training
    model.first(torch.randn(2, 3, 1, 1))
    assert calls == ["hook"]


def test_a_model_that_is_a_batch_norm_is_replaced() -> None:
    converted = convert_sync_batchnorm(nn.BatchNorm1d(3), run_of(), BatchShare())
    assert type(converted) is SyncBatchNorm


def test_nothing_is_exchanged_in_evaluation() -> None:
    def run(communicator: Communicator) -> None:
        for tracks in (True, False):
            plain = nn.BatchNorm1d(4, track_running_stats=tracks)
            layer = convert_sync_batchnorm(
                copy.deepcopy(plain), run_of(communicator), BatchShare()
            ).eval()
            x = torch.randn(6, 4)
            if communicator.rank == 0:  # alone
                assert torch.equal(layer(x), plain.eval()(x))

    run_ranks(2, run)


def test_one_value_a_channel_on_each_rank_is_enough() -> None:
    x = torch.tensor([[1.0, 5.0], [3.0, 9.0]])

    def run(communicator: Communicator) -> Tensor:
        layer: Any = convert_sync_batchnorm(
            nn.BatchNorm1d(2, momentum=1.0), run_of(communicator), share_of(0, 1, 2)
        )
        layer(x[communicator.rank : communicator.rank + 1])
        return torch.stack([layer.running_mean, layer.running_var])

    for statistics in run_ranks(2, run):
        torch.testing.assert_close(statistics, torch.tensor([[2.0, 7.0], [2.0, 8.0]]))


def test_one_value_a_channel_in_the_whole_batch_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))

    def run(communicator: Communicator) -> None:
        share = share_of(0, 1 - communicator.rank, 1)  # rank 1 has only a placeholder sample
        convert_sync_batchnorm(copy.deepcopy(model), run_of(communicator), share)(torch.ones(1, 2))

    with pytest.raises(ConfigError, match="1: the global batch has one value per channel"):
        run_ranks(2, run)


def test_equal_statistics_are_not_averaged_again() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True))
    synced = convert_sync_batchnorm(model, run_of(), BatchShare())
    flat = RunningStatistics(synced).flat
    assert flat is not None
    assert flat.numel() == 6  # the InstanceNorm's


def test_a_silent_peer_is_named_with_the_layer() -> None:
    communicator = ThreadGroup(2, timeout=0.01).communicator(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    layer = convert_sync_batchnorm(model, run_of(communicator), BatchShare())
    with pytest.raises(CommTimeout, match=r"waiting for ranks \[1\] in the forward of 1"):
        layer(torch.ones(2, 2))


class CountsStartups(ThreadCommunicator):
    """Counts how often the start-up was said to be over."""

    ended_startups = 0

    def end_startup(self) -> None:
        self.ended_startups += 1


def test_the_start_up_is_over_with_the_first_step() -> None:
    communicator, share = CountsStartups(ThreadGroup(1), 0), BatchShare()
    layer = convert_sync_batchnorm(nn.BatchNorm1d(2), run_of(communicator), share)
    share.begin(1.0)
    layer(torch.randn(3, 2))
    assert communicator.ended_startups == 0
    share.begin(1.0)
    layer(torch.randn(3, 2))
    assert communicator.ended_startups > 0


def penalised(layer: nn.Module, x: Tensor) -> None:
    """Differentiate a layer's gradient; that of its sum doesn't depend on a parameter."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    slope.pow(2).sum().backward()


def in_forward_mode(layer: nn.Module, x: Tensor) -> None:
    with forward_ad.dual_level():
        layer(forward_ad.make_dual(x, torch.ones_like(x)))


def in_a_transform(layer: nn.Module, x: Tensor) -> None:
    torch.func.jvp(layer, (x,), (torch.ones_like(x),))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # forward mode needs it
@pytest.mark.parametrize(
    ("use", "what"),
    [
        (penalised, "differentiated twice"),
        (in_forward_mode, "called in forward-mode differentiation"),
        (in_a_transform, "called in forward-mode differentiation or a transform"),
    ],
)
def test_other_derivatives_are_refused(use: Any, what: str) -> None:
    def run(communicator: Communicator) -> bool:
        model = nn.Sequential(nn.BatchNorm2d(4))
        convert_sync_batchnorm(model, run_of(communicator), share_of(0, 9, 9))
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
        with pytest.raises(ConfigError, match=rf"^0 is {what}.*sync_bn=True.*nn\.GroupNorm"):
            use(model, x)
        (slope,) = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)
        return slope.requires_grad  # it isn't taken for a constant

    assert run_ranks(1, run) == [True]  # forward mode knows one thread at a time


class ActivatedBatchNorm(nn.BatchNorm2d):
    """BatchNorm with an activation in its forward, as some libraries have it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class NaiveSyncBatchNorm(nn.BatchNorm2d):
    """BatchNorm that synchronises by itself, through torch's default group."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def sync_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.BatchNorm1d(4))


def test_torchs_own_layers_are_found_and_replaced_without_the_argument() -> None:
    model = sync_model()
    assert batch_norms(model, every=False) == ["1"]
    assert batch_norms(model, every=True) == ["1", "2"]
    layers = ThreadGroup(1).communicator(0)
    convert_sync_batchnorm(model, run_of(layers), BatchShare(), every=False)
    assert type(model[1]) is SyncBatchNorm
    assert type(model[2]) is nn.BatchNorm1d
    assert batch_norms(model, every=False) == ["1"]  # another world replaces it again


@pytest.mark.parametrize(
    ("layer", "every", "sentence"),
    [
        (ActivatedBatchNorm(4), True, "0 is of class ActivatedBatchNorm.*or leave out --sync_bn"),
        (
            NaiveSyncBatchNorm(4),
            False,
            "0 is of class NaiveSync.*--sync_bn, with what",
        ),
    ],
)
def test_a_forward_that_would_be_lost_is_refused(
    layer: nn.Module, every: bool, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        batch_norms(nn.Sequential(layer), every=every)


def test_a_layer_of_another_group_is_refused() -> None:
    model = sync_model()
    model[1].process_group = object()
    with pytest.raises(ConfigError, match="1 is a SyncBatchNorm with a process group of its own"):
        batch_norms(model, every=False)


def test_a_batch_norm_with_a_forward_of_its_own_stays_without_the_argument() -> None:
    assert batch_norms(nn.Sequential(ActivatedBatchNorm(4)), every=False) == []
