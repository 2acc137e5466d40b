"""A part of an optimizer: an object of its class that knows some of its parameters only.

It shares the optimizer's state, so the update is torch's own and the state is where
`optimizer.state_dict()` looks for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import SGD, Optimizer

# What a GradScaler sets for the time of a fused optimizer's step, which unscales or skips itself.
_SCALING = ("grad_scale", "found_inf")
_FUSED = (torch.float32, torch.float64)


class Part:
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
        before = [dict(group) for group in self._part.param_groups]
        fuse = all(_can_fuse(self._part, group) for group in self._part.param_groups)
        for group in self._part.param_groups if fuse else ():
            group["fused"] = True  # one pass over the memory instead of four
        _unhooked_step(self._part)
        for group in self._part.param_groups:
            if group.get("fused"):
                increment_version(group["params"])  # which torch's fused kernels don't
            if fuse:
                group["fused"] = None
        for index, group, old in zip(self._indices, self._part.param_groups, before, strict=True):
            changed = {name: value for name, value in group.items() if value is not old.get(name)}
            self._optimizer.param_groups[index].update(changed)


def _can_fuse(part: Optimizer, group: Mapping[str, Any]) -> bool:
    """Tell whether torch's fused SGD does the same to a group, where nobody chose how.

    It wants all gradients, and momenta for all or none that lie in memory as their parameters do;
    and its first step has to be the plain one, which starts the momenta.
    """
    if type(part) is not SGD or any(group.get(name) is not None for name in ("fused", "foreach")):
        return False
    if group.get("differentiable"):
        return False
    momenta = [part.state[p].get("momentum_buffer") for p in group["params"]]
    return all(
        p.dtype in _FUSED and _lies_as(p.grad, p) and (not group["momentum"] or _lies_as(m, p))
        for p, m in zip(group["params"], momenta, strict=True)
    )


def _lies_as(tensor: Tensor | None, parameter: Tensor) -> bool:
    return (
        tensor is not None
        and tensor.dtype == parameter.dtype
        and tensor.layout == torch.strided
        and _dense_strides(parameter) is not None
        and (
            tensor.stride() == parameter.stride()
            or _dense_strides(tensor) == _dense_strides(parameter)
        )
    )


def _dense_strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides that matter; None where the memory has gaps."""
    places = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    expected = 1
    for stride, size in sorted(places):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected *= size
    return tuple(stride for stride, size in places if size != 1)


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
