"""A part of an optimizer: an object of its class that knows some of its parameters only.

It shares the optimizer's state, so the update is torch's own and the state is where
`optimizer.state_dict()` looks for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import SGD, Optimizer
from torch.optim.sgd import sgd

# What a GradScaler sets for the time of a fused optimizer's step, which unscales or skips itself.
_SCALING = ("grad_scale", "found_inf")
_FUSED = (torch.float32, torch.float64)
_HYPERPARAMETERS = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")


class SubOptimizer:
    """Updates some parameters of an optimizer.

    Args:
        optimizer: the whole one.
        groups: the parameters, with the index of each one's group there.
        state: where theirs is, if not with the optimizer's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Mapping[nn.Parameter, int],
        state: dict[Tensor, Any] | None = None,
    ) -> None:
        self._optimizer, self._state = optimizer, state
        self._part: Optimizer = object.__new__(type(optimizer))
        self._part.__dict__.update(optimizer.__dict__)
        self._part.__dict__.pop("step", None)  # schedulers and Paceline wrap the instance's
        self._part._optimizer_step_pre_hooks = OrderedDict()
        self._part._optimizer_step_post_hooks = OrderedDict()
        self._indices = sorted(set(groups.values()))
        self._part.param_groups = [
            {
                "params": [p for p, group in groups.items() if group == index],
                **_hyperparameters(optimizer.param_groups[index]),
            }
            for index in self._indices
        ]

    def freeze(self) -> None:
        """Take the optimizer's present hyperparameters for the next step."""
        part, whole = self._part, self._optimizer
        # load_state_dict() makes a new one
        part.state = whole.state if self._state is None else self._state  # type: ignore[assignment]
        for name in _SCALING:
            setattr(part, name, getattr(whole, name, None))
        for index, group in zip(self._indices, part.param_groups, strict=True):
            group.update(_hyperparameters(whole.param_groups[index]))

    def step(self) -> None:
        """Update from the parameters' gradients.

        What the update itself changes among the hyperparameters (some optimizers count there) is
        changed in the whole optimizer, too.
        """
        if self.step_fused([p.grad for group in self._part.param_groups for p in group["params"]]):
            return
        before = [dict(group) for group in self._part.param_groups]
        _unhooked_step(self._part)
        for index, group, old in zip(self._indices, self._part.param_groups, before, strict=True):
            if group.get("fused"):
                increment_version(group["params"])  # which torch's fused kernels don't
            changed = {name: value for name, value in group.items() if value is not old.get(name)}
            self._optimizer.param_groups[index].update(changed)

    def step_fused(self, gradients: Sequence[Tensor | None]) -> bool:
        """Update by torch's fused SGD, one pass over the memory instead of four, if it may be.

        It wants all gradients, and momenta for all or none, that lie in memory as their parameters
        do; and the first step has to be the optimizer's, which starts the momenta.

        Args:
            gradients: one a parameter; the parameters' own aren't looked at.

        Returns:
            whether the update is done.
        """
        part, group = self._part, self._part.param_groups[0]
        if type(part) is not SGD or len(part.param_groups) > 1 or not _may_fuse(group):
            return False
        parameters, momenta = group["params"], []
        if group["momentum"] != 0:
            momenta = [part.state[p].get("momentum_buffer") for p in parameters]
        if not _lie_as(parameters, gradients, momenta):
            return False
        with torch.no_grad():
            sgd(
                parameters,
                gradients,  # type: ignore[arg-type]  # all are there
                momenta or [None] * len(parameters),
                fused=True,
                grad_scale=getattr(part, "grad_scale", None),
                found_inf=getattr(part, "found_inf", None),
                **{name: group[name] for name in _HYPERPARAMETERS},
            )
        increment_version(parameters)  # which torch's fused kernels don't
        return True


def _may_fuse(group: Mapping[str, Any]) -> bool:
    """Tell whether nobody chose another way."""
    chosen = group["foreach"] is not None or group["fused"] not in (None, True)
    return not chosen and not group["differentiable"]


def _lie_as(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    momenta: Sequence[Tensor | None],
) -> bool:
    """Tell whether gradients, and momenta, if any, lie as their parameters, without gaps."""
    strided, dtype = torch.strided, parameters[0].dtype
    for p, gradient, momentum in zip(parameters, gradients, momenta or parameters, strict=True):
        if gradient is None or momentum is None:
            return False
        if not (p.dtype is gradient.dtype is momentum.dtype is dtype):
            return False
        if not (gradient.layout is momentum.layout is strided):
            return False
        shape, stride = p.shape, p.stride()
        places = _dense_strides(shape, stride)
        if places is None or gradient.shape != shape:
            return False
        for own in (gradient.stride(), momentum.stride()):
            if own != stride and _dense_strides(shape, own) != places:
                return False
    return dtype in _FUSED


@lru_cache(maxsize=10_000)
def _dense_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides that matter; None where the memory has gaps."""
    places = list(zip(stride, shape, strict=True))
    expected = 1
    for step, size in sorted(places):
        if size == 1:
            continue
        if step != expected:
            return None
        expected *= size
    return tuple(step for step, size in places if size != 1)


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
