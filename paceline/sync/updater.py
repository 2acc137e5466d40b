"""Applying a torch optimizer a bucket at a time, with the hyperparameters of `optimizer.step()`.

For each bucket there is a *part*: an object of the optimizer's own class that knows only this
bucket's parameters and shares the optimizer's state. So the update is torch's own, the state is
where `optimizer.state_dict()` looks for it, and a bucket can be updated as soon as its gradients
are there. That is right for optimizers that treat every value by itself; any other optimizer
updates all buckets at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.sync.bucket import Bucket

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.NAdam,
        optim.RAdam,
        optim.Adamax,
        optim.Adagrad,
        optim.Adadelta,
        optim.RMSprop,
        optim.Rprop,
        optim.ASGD,
    }
)

# What a GradScaler sets for the time of a fused optimizer's step, which unscales or skips itself.
_SCALING = ("grad_scale", "found_inf")


class Updater:
    """Updates parameters from reduced gradients."""

    def __init__(self, optimizer: Optimizer, buckets: Sequence[Bucket]) -> None:
        """Prepare one part a bucket, or one for all.

        Raises:
            ConfigError: the optimizer evaluates the loss itself (LBFGS).
        """
        if isinstance(optimizer, optim.LBFGS):
            raise ConfigError(
                "LBFGS evaluates the loss several times a step, which can't be exchanged: "
                "use an optimizer with one gradient a step."
            )
        self._optimizer = optimizer
        if type(optimizer) in ELEMENTWISE:
            self._units: list[tuple[Bucket, ...]] = [(bucket,) for bucket in buckets]
        else:
            self._units = [tuple(buckets)] * len(buckets)
        self._frozen: dict[nn.Parameter, tuple[int, torch.dtype]] = {}  # and not yet updated
        self._parts: dict[tuple[Bucket, ...], Optimizer] = {}
        for unit in self._units:
            if unit not in self._parts:
                self._parts[unit] = _part(optimizer, unit)

    def unit(self, bucket: Bucket) -> tuple[Bucket, ...]:
        """The buckets that must be updated together with `bucket`, itself included."""
        return self._units[bucket.index]

    def freeze(self) -> None:
        """Take the optimizer's present hyperparameters for the updates to come."""
        self._frozen = {p: _version(p) for unit in self._parts for p in _parameters(unit)}
        for part in self._parts.values():
            part.state = self._optimizer.state  # load_state_dict() makes a new one
            for name in _SCALING:
                setattr(part, name, getattr(self._optimizer, name, None))
            for group in part.param_groups:
                group.update(_hyperparameters(self._optimizer.param_groups[group["index"]]))

    def update(self, unit: tuple[Bucket, ...], gradients: Sequence[Tensor | None]) -> None:
        """Update a unit's parameters from the means of their gradients, in the unit's order.

        The parameters' own `.grad` are as before afterwards.

        Raises:
            ConfigError: a parameter was written since `freeze`, which the update would undo.
        """
        parameters = _parameters(unit)
        self._refuse_writes(unit)
        kept = [p.grad for p in parameters]
        with torch.inference_mode(False):  # an evaluation's block may be what first reads
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            _unhooked_step(self._parts[unit])
            for p, grad in zip(parameters, kept, strict=True):
                p.grad = grad

    def _refuse_writes(self, unit: tuple[Bucket, ...]) -> None:
        """Refuse an update of what somebody has written or converted."""
        for bucket in unit:
            for p, name in zip(bucket.parameters, bucket.names, strict=True):
                now = _version(p)
                if self._frozen.pop(p, now) != now:
                    raise ConfigError(
                        f"{name} was written between optimizer.step() and its update, which the "
                        "next forward installs: call settle() after optimizer.step(), then write."
                    )


def _parameters(unit: tuple[Bucket, ...]) -> list[nn.Parameter]:
    return [p for bucket in unit for p in bucket.parameters]


def _version(parameter: nn.Parameter) -> tuple[int, torch.dtype]:
    """Return what a write changes, by autograd's count, or a conversion (`model.half()`)."""
    return parameter._version, parameter.dtype


def _part(optimizer: Optimizer, unit: tuple[Bucket, ...]) -> Optimizer:
    """Make an optimizer of the same class over a unit's parameters, with shared state."""
    part: Optimizer = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    part.__dict__.pop("step", None)  # schedulers and Paceline wrap the instance's
    part._optimizer_step_pre_hooks = OrderedDict()
    part._optimizer_step_post_hooks = OrderedDict()
    part.param_groups = [
        {"index": index, "params": parameters, **_hyperparameters(optimizer.param_groups[index])}
        for index in range(len(optimizer.param_groups))
        if (parameters := [p for b in unit if b.group == index for p in b.parameters])
    ]
    return part


def _unhooked_step(part: Optimizer) -> None:
    """Update; hooks on every optimizer's step are for the user's, not for its parts'."""
    step = type(part).step
    if getattr(step, "hooked", False):  # by torch, in the optimizer's constructor
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(part)


def _hyperparameters(group: dict[str, object]) -> dict[str, object]:
    """Copy a parameter group without its parameters; a tensor (a learning rate) is cloned."""
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
