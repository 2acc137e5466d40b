"""Sub-optimizers update as the whole optimizer does, whichever kernel they use."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Optimizer

from paceline.reduce.buckets import Bucket, partition
from paceline.update.updater import StepHyperparameters, SubOptimizer, Updater

SHAPES = [(4, 3, 3, 3), (8, 4, 1, 1), (5,), (6, 5)]


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(3)
    tensors = [torch.randn(shape) for shape in SHAPES]
    images = [t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for t in tensors]
    return [nn.Parameter(tensor) for tensor in images]


def gradients(step: int, missing: Sequence[int] = ()) -> list[Tensor | None]:
    torch.manual_seed(100 + step)
    return [None if place in missing else torch.randn(s) for place, s in enumerate(SHAPES)]


def sent(hyperparameters: StepHyperparameters) -> StepHyperparameters:
    """Send hyperparameters as an owner without an optimizer would receive them."""
    data = io.BytesIO()
    torch.save(asdict(hyperparameters), data)
    data.seek(0)
    return StepHyperparameters(**torch.load(data, weights_only=True))


def both(make: Any, steps: Sequence[list[Tensor | None]]) -> list[list[Tensor]]:
    """Return the parameters after some steps: a sub-optimizer's, and the plain optimizer's."""
    ours, theirs = parameters(), parameters()
    optimizer, plain = make(ours), make(theirs)
    sub_optimizer = SubOptimizer(optimizer, dict.fromkeys(ours, 0))
    for given in steps:
        laid = [
            None if gradient is None else torch.empty_like(p).copy_(gradient)
            for p, gradient in zip(ours, given, strict=True)
        ]
        for q, gradient in zip(theirs, laid, strict=True):
            q.grad = None if gradient is None else gradient.clone()
        sub_optimizer.freeze(sent(StepHyperparameters.of(optimizer)))
        sub_optimizer.step(laid)
        plain.step()
    return [[p.detach() for p in values] for values in (ours, theirs)]


def nesterov(ps: list[nn.Parameter], fused: bool | None = None) -> SGD:
    return SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=fused)


@pytest.mark.parametrize(
    "missing", [[(), (), ()], [(1,), (), (0,)], [(0, 1, 2, 3), (2,), ()]], ids=str
)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_with_gradients_that_come_and_go(missing: list[Sequence[int]], momentum: float) -> None:
    steps = [gradients(number, places) for number, places in enumerate(missing)]
    ours, theirs = both(lambda ps: SGD(ps, lr=0.1, momentum=momentum), steps)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("overflow", [0.0, 1.0])
def test_one_pass_of_sgd_unscales_and_skips_as_a_grad_scaler_asks(overflow: float) -> None:
    def scaled(ps: list[nn.Parameter]) -> SGD:
        optimizer: Any = nesterov(ps, fused=True)
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.found_inf = torch.tensor(overflow)
        return optimizer  # type: ignore[no-any-return]

    ours, theirs = both(scaled, [gradients(step) for step in range(3)])
    for a, b, unchanged in zip(ours, theirs, parameters(), strict=True):
        torch.testing.assert_close(a, b)
        assert torch.equal(a, unchanged) == bool(overflow)


@pytest.mark.parametrize(("chosen", "steps"), [(None, 2), (True, 3), (False, 0)], ids=str)
def test_sgd_takes_one_pass_once_its_momenta_are_there_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, chosen: bool | None, steps: int
) -> None:
    passes = []
    fused = torch._fused_sgd_

    def counted(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        passes.append(len(params))
        fused(params, *args, **kwargs)

    monkeypatch.setattr(torch, "_fused_sgd_", counted)
    given = [gradients(number) for number in range(3)]
    ours, theirs = both(lambda ps: nesterov(ps, chosen), given)
    plain = 3 if chosen else 0  # the plain optimizer's own
    assert passes == [len(SHAPES)] * (steps + plain)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_differentiable_step_of_leaves_fails_as_torchs_own_does() -> None:
    ours = parameters()
    optimizer = SGD(ours, lr=0.1, differentiable=True)
    sub_optimizer = SubOptimizer(optimizer, dict.fromkeys(ours, 0))
    sub_optimizer.freeze(StepHyperparameters.of(optimizer))
    given = [torch.zeros_like(p) for p in ours]
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        sub_optimizer.step(given)


def test_a_momentum_that_is_switched_on_and_off_again_between_steps() -> None:
    ours, theirs = parameters(), parameters()
    optimizer, plain = SGD(ours, lr=0.1), SGD(theirs, lr=0.1)
    sub_optimizer = SubOptimizer(optimizer, dict.fromkeys(ours, 0))
    for step, momentum in enumerate([0.0, 0.9, 0.9, 0.0, 0.9]):
        for one in (optimizer, plain):
            one.param_groups[0]["momentum"] = momentum
        laid = [
            torch.empty_like(p).copy_(gradient)  # type: ignore[arg-type]
            for p, gradient in zip(ours, gradients(step), strict=True)
        ]
        for q, gradient in zip(theirs, laid, strict=True):
            q.grad = gradient.clone()
        sub_optimizer.freeze(StepHyperparameters.of(optimizer))
        sub_optimizer.step(laid)
        plain.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach())


def test_momenta_that_lie_otherwise_are_taken_by_value() -> None:
    ps = parameters()
    optimizer = nesterov(ps)
    for p, gradient in zip(ps, gradients(0), strict=True):
        p.grad = torch.empty_like(p).copy_(gradient)  # type: ignore[arg-type]
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    results = []
    for contiguous in (False, True):
        own = [nn.Parameter(p.detach().clone()) for p in ps]
        again = nesterov(own)
        again.load_state_dict(copy.deepcopy(state))
        laid = []
        for p, gradient in zip(own, gradients(1), strict=True):
            momentum = again.state[p]["momentum_buffer"]
            if contiguous:
                again.state[p]["momentum_buffer"] = momentum.contiguous()
            laid.append(torch.empty_like(p).copy_(gradient))  # type: ignore[arg-type]
        sub_optimizer = SubOptimizer(again, dict.fromkeys(own, 0))
        sub_optimizer.freeze(StepHyperparameters.of(again))
        sub_optimizer.step(laid)
        results.append([p.detach() for p in own])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_parameter_with_gaps_in_its_memory_is_updated_by_its_own_values() -> None:
    """Torch's fused kernel would read and write values between its own."""
    torch.manual_seed(5)
    memory, given = torch.randn(6, 8), torch.randn(6, 8)[:, ::2]
    before = memory.clone()
    p = nn.Parameter(memory[:, ::2])
    optimizer = SGD([p], lr=0.1)
    sub_optimizer = SubOptimizer(optimizer, {p: 0})
    sub_optimizer.freeze(StepHyperparameters.of(optimizer))
    sub_optimizer.step([given])
    torch.testing.assert_close(memory[:, ::2], before[:, ::2] - 0.1 * given)
    assert torch.equal(memory[:, 1::2], before[:, 1::2])


def updater_of(
    optimizer: Optimizer, ps: list[nn.Parameter], bucket_bytes: int
) -> tuple[Updater, tuple[Bucket, ...]]:
    names = {p: f"p{place}" for place, p in enumerate(ps)}
    buckets = partition(names, dict.fromkeys(ps, 0), bucket_bytes)
    return Updater(optimizer, buckets), buckets


def test_an_update_under_autocast_is_the_plain_one() -> None:
    ps, plain = parameters(), parameters()
    ours, theirs = Adafactor(ps, lr=0.1), Adafactor(plain, lr=0.1)
    updater, (bucket,) = updater_of(ours, ps, 10**6)
    unit = updater.unit(bucket)
    for p, gradient in zip(plain, gradients(0), strict=True):
        p.grad = torch.empty_like(p).copy_(gradient)  # type: ignore[arg-type]
    theirs.step()
    of = dict(zip(ps, [p.grad for p in plain], strict=True))
    updater.freeze()
    with torch.autocast("cpu", torch.bfloat16):
        updater.update(unit, [of[p] for bucket in unit for p in bucket.parameters])
    for a, b in zip(ps, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [None, True, False], ids=str)
def test_an_update_counts_as_a_write_and_leaves_the_parameters_own_gradients(
    fused: bool | None,
) -> None:
    ps, plain = parameters(), parameters()
    updater, (bucket,) = updater_of(nesterov(ps, fused), ps, 10**6)
    theirs = nesterov(plain)
    own = [torch.ones_like(p) for p in ps]
    for step in range(3):
        given = dict(zip(ps, gradients(step), strict=True))
        for p, q, gradient in zip(ps, plain, own, strict=True):
            p.grad, q.grad = gradient, torch.empty_like(q).copy_(given[p])  # type: ignore[arg-type]
        theirs.step()
        versions = [p._version for p in ps]
        updater.freeze()
        laid = [torch.empty_like(p).copy_(given[p]) for p in bucket.parameters]  # type: ignore[arg-type]
        updater.update(updater.unit(bucket), laid)
        assert all(p.grad is gradient for p, gradient in zip(ps, own, strict=True))
        assert all(p._version > before for p, before in zip(ps, versions, strict=True))
    for a, b in zip(ps, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_a_gradient_of_a_parameter_that_grew_is_refused_by_torch() -> None:
    (p, *_) = ps = [nn.Parameter(torch.zeros(6, 4))]
    updater, (bucket,) = updater_of(SGD(ps, lr=1.0), ps, 1)
    p.data = torch.zeros(7, 4)
    updater.freeze()
    with pytest.raises(RuntimeError, match="tensor of size"):
        updater.update(updater.unit(bucket), [torch.ones(6, 4)])


def test_parameters_cut_out_of_one_tensor_are_updated_one_after_the_other() -> None:
    base = torch.randn(6, 4)
    ps = [nn.Parameter(part) for part in base.chunk(3)]
    updater, buckets = updater_of(SGD(ps, lr=1.0), ps, 1)
    before = base.clone()
    updater.freeze()
    for bucket in buckets:
        updater.update(updater.unit(bucket), [torch.ones(2, 4)])
    torch.testing.assert_close(base, before - 1)
