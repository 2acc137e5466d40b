"""A part of an optimizer: an object of its class that knows some of its parameters only.

It shares the optimizer's state, so the update is torch's own and the state is where
`optimizer.state_dict()` looks for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
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
        if _can_fuse(self._part):
            self._step_fused()
            return
        before = [dict(group) for group in self._part.param_groups]
        _unhooked_step(self._part)
        for index, group, old in zip(self._indices, self._part.param_groups, before, strict=True):
            if group.get("fused"):
                increment_version(group["params"])  # which torch's fused kernels don't
            changed = {name: value for name, value in group.items() if value is not old.get(name)}
            self._optimizer.param_groups[index].update(changed)

    def _step_fused(self) -> None:
        """Update in one pass over the memory instead of four."""
        for group in self._part.param_groups:
            group["fused"] = True
        _unhooked_step(self._part)
        for group in self._part.param_groups:
            increment_version(group["params"])
            group["fused"] = None


def _can_fuse(part: Optimizer) -> bool:
    """Tell whether torch's fused SGD does the same, where nobody chose how.

    It wants all gradients, and momenta for all or none that lie in memory as their parameters do;
    and its first step has to be the plain one, which starts the momenta.
    """
    return type(part) is SGD and all(_is_free(g) and _all_lie(part, g) for g in part.param_groups)


def _is_free(group: Mapping[str, Any]) -> bool:
    chosen = any(group.get(name) is not None for name in ("fused", "foreach"))
    return not chosen and not group.get("differentiable")


def _all_lie(part: Optimizer, group: Mapping[str, Any]) -> bool:
    state, moves = part.state, group["momentum"] != 0
    for p in group["params"]:
        stride = p.stride()
        places = _dense_strides(p.shape, stride)
        if p.dtype not in _FUSED or places is None or not _lies_as(p.grad, p, stride):
            return False
        if moves and not _lies_as(state[p].get("momentum_buffer"), p, stride):
            return False
    return True


def _lies_as(tensor: Tensor | None, parameter: Tensor, stride: tuple[int, ...]) -> bool:
    """Tell whether a tensor lies as a parameter with gapless strides."""
    if tensor is None or tensor.dtype is not parameter.dtype or tensor.layout is not torch.strided:
        return False
    own = tensor.stride()
    return own == stride or (
        _dense_strides(tensor.shape, own) == _dense_strides(parameter.shape, stride)
    )


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
