"""Applying a torch optimizer a bucket at a time, with the hyperparameters of `optimizer.step()`.

For each bucket there is a *part*: an object of the optimizer's own class that knows only this
bucket's parameters and shares the optimizer's state. So the update is torch's own, the state is
where `optimizer.state_dict()` looks for it, and a bucket can be updated as soon as its gradients
are there. That is right for optimizers that treat every value by itself; any other optimizer
updates all buckets at once, from copies: it may write into gradients, or keep them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket
from paceline.update.parameter_guard import ParameterGuard
from paceline.update.sub_optimizer import SubOptimizer

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


class Updater:
    """Updates parameters from reduced gradients."""

    def __init__(self, optimizer: Optimizer, buckets: Sequence[Bucket]) -> None:
        """Prepare one part a bucket, or one for all.

        Raises:
            ConfigError: the optimizer evaluates the loss itself (LBFGS), or wants gradients that
                aren't exchanged (SparseAdam).
        """
        if isinstance(optimizer, optim.LBFGS):
            raise ConfigError(
                "LBFGS evaluates the loss several times a step, which can't be exchanged: "
                "use an optimizer with one gradient a step."
            )
        if isinstance(optimizer, optim.SparseAdam):
            raise ConfigError(
                "SparseAdam takes sparse gradients only, which can't be exchanged: use Adam, and "
                "layers with sparse=False."
            )
        self._optimizer = optimizer
        self._borrows = type(optimizer) in ELEMENTWISE  # neither writes gradients nor keeps them
        if self._borrows:
            self._units: list[tuple[Bucket, ...]] = [(bucket,) for bucket in buckets]
        else:
            self._units = [tuple(buckets)] * len(buckets)
        self._guard = ParameterGuard(self._units)
        self._parts = {
            unit: SubOptimizer(optimizer, {p: b.group for b in unit for p in b.parameters})
            for unit in dict.fromkeys(self._units)
        }

    def unit(self, bucket: Bucket) -> tuple[Bucket, ...]:
        """The buckets that must be updated together with `bucket`, itself included."""
        return self._units[bucket.index]

    def freeze(self) -> None:
        """Take the optimizer's present hyperparameters for the updates to come."""
        self._guard.freeze()
        for part in self._parts.values():
            part.freeze()

    def update(self, unit: tuple[Bucket, ...], gradients: Sequence[Tensor | None]) -> None:
        """Update a unit's parameters from the means of their gradients, in the unit's order.

        The parameters' own `.grad` are as before afterwards.

        Raises:
            ConfigError: a parameter was written since `freeze`, which the update would undo.
        """
        parameters = _parameters(unit)
        self._guard.refuse(unit)
        device = parameters[0].device.type
        # It runs in whatever block first reads: an evaluation's, one under autocast.
        if _is_plain(device):
            self._step(unit, parameters, gradients)
        else:
            with torch.inference_mode(False), torch.autocast(device, enabled=False):
                self._step(unit, parameters, gradients)

    def _step(
        self,
        unit: tuple[Bucket, ...],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
    ) -> None:
        part = self._parts[unit]
        if part.step_fused(gradients):
            return
        kept = [p.grad for p in parameters]
        for p, gradient in zip(parameters, gradients, strict=True):
            if gradient is None or self._borrows or gradient is p.grad:
                p.grad = gradient
            else:
                p.grad = gradient.clone()  # other ranks read it, and the next sum is written there
        part.step()
        for p, grad in zip(parameters, kept, strict=True):
            p.grad = grad


def _is_plain(device: str) -> bool:
    """Tell whether no block is around that changes what operations do."""
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled(device)
    )


def _parameters(unit: tuple[Bucket, ...]) -> list[nn.Parameter]:
    return [p for bucket in unit for p in bucket.parameters]
