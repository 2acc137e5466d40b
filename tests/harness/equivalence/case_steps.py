"""Steps and optimizers of the equivalence grid, as people write them for one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.harness.equivalence.large_batch import World


def three_groups(model: nn.Module) -> Optimizer:
    """A rate for each layer, and no weight decay or momentum in one."""
    layers = [list(m.parameters()) for m in model.children()]
    first, *middle, last = [parameters for parameters in layers if parameters]
    return torch.optim.SGD(
        [
            {"params": last, "lr": 0.2, "momentum": 0.0},
            {"params": [p for parameters in middle for p in parameters]},
            {"params": first, "lr": 0.05, "weight_decay": 0.1},
        ],
        lr=0.1,
        momentum=0.9,
    )


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def fused(model: nn.Module) -> Optimizer:
    """An optimizer whose kernel unscales gradients, and skips the update, itself."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def with_outside_parameter(model: nn.Module) -> Optimizer:
    return torch.optim.SGD([*model.parameters(), *model.outside], lr=0.1, momentum=0.9)  # type: ignore[misc]


def accumulated(world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """Three backwards, of as equal parts as the samples allow, and of one sample at least."""
    parts = [part for part in torch.arange(len(x)).tensor_split(3) if len(part)]
    with world.no_sync():
        for part in parts[:-1]:
            (_loss(model, x[part], y[part]) * len(part) / len(x)).backward()
    part = parts[-1]
    (_loss(model, x[part], y[part]) * len(part) / len(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


def two_losses(world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """Two backwards, each from a forward of the whole batch."""
    with world.no_sync():
        (0.3 * _loss(model, x, y)).backward()
    (0.7 * F.cross_entropy(model(x), y, label_smoothing=0.5)).backward()
    optimizer.step()
    optimizer.zero_grad()


def zeroed_not_removed(
    world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
) -> None:
    optimizer.zero_grad(set_to_none=False)
    _loss(model, x, y).backward()
    optimizer.step()


class Keeping:
    """Gradients' memory is kept from step to step, another way each time."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(
        self, world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> None:
        self.steps += 1
        way = self.steps % 5
        _loss(model, x, y).backward()
        if way:
            optimizer.step()
        if way <= 1:  # 0: after a step without an update
            optimizer.zero_grad(set_to_none=False)
        elif way == 2:
            model.zero_grad(set_to_none=False)
        elif way == 3:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        else:
            optimizer.zero_grad()


def clipped_by_norm(
    world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
) -> None:
    _loss(model, x, y).backward()
    world.reduce()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm > 0.1
    optimizer.step()
    optimizer.zero_grad()


def clipped_by_value(
    world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
) -> None:
    _loss(model, x, y).backward()
    world.reduce()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


def set_by_hand(world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """Replace one gradient, remove one, change one in place."""
    _loss(model, x, y).backward()
    world.reduce()
    first, second, third, *_ = [p for p in model.parameters() if p.requires_grad]
    assert first.grad is not None
    assert third.grad is not None
    first.grad = first.grad.sign()
    second.grad = None
    third.grad.mul_(0.5)
    optimizer.step()
    optimizer.zero_grad()


class Scaled:
    """Loss scaling; the second step's loss isn't finite where the batch's first sample is."""

    def __init__(self, *, unscale: bool) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.unscale = unscale
        self.steps = 0

    def __call__(
        self, world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> None:
        self.steps += 1
        losses = F.cross_entropy(model(x), y, reduction="none")
        if self.steps == 2:
            losses = torch.where(x[:, 0, 0, 0] > FIRST - 1e-9, losses * torch.inf, losses)
        self.scaler.scale(losses.mean()).backward()
        world.reduce()
        if self.unscale:
            self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        assert self.scaler.get_scale() == (2.0**10 if self.steps < 2 else 2.0**9)


FIRST = 1.5  # some samples of the second batch are above it there, on some of the ranks


def with_closure(
    world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = _loss(model, x, y)
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)


class WithHooks:
    """The optimizer's own hooks clip before its step, and pull the weights in after it."""

    def __init__(self) -> None:
        self.registered = False

    def __call__(
        self, world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> None:
        if not self.registered:
            optimizer.register_step_pre_hook(_clip)
            optimizer.register_step_post_hook(_shrink)
            self.registered = True
        _loss(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


class EveryOther:
    """Of three steps one has no forward and backward, and the one after that no update."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(
        self, world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> None:
        self.steps += 1
        if self.steps % 3 != 2:
            _loss(model, x, y).backward()
        if self.steps % 3:
            optimizer.step()
        optimizer.zero_grad()


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def _clip(optimizer: Optimizer, args: object, kwargs: object) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, 0.1)


@torch.no_grad()
def _shrink(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.mul_(0.99)
