"""Updates a bucket by torch's optimizer; the table of optimizers that may update bucket by bucket.

Each bucket has a sub-optimizer: an object of the optimizer's own class that knows only this
bucket's parameters and shares the optimizer's state. So the update is torch's own, the state is
where `optimizer.state_dict()` looks for it, and a bucket is updated as soon as its gradients
have arrived. That is right for optimizers that treat every value by itself. Any other optimizer
updates all buckets at once, from copies of the gradients: it may write or retain them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.autograd.graph import increment_version
from torch.optim import SGD, Optimizer
from torch.optim.sgd import sgd

from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket
from paceline.update.write_guard import WriteGuard, late_write

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
_FUSED = (torch.float32, torch.float64)
_HYPERPARAMETERS = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")


class Updater:
    """Updater of all parameters from reduced gradients, one set of buckets at a time.

    The buckets of a set must be updated together: `unit` returns the set of a bucket.

    Args:
        optimizer: the user's optimizer.
        buckets: the buckets of all exchanged parameters.

    Raises:
        ConfigError: the optimizer evaluates the loss itself (LBFGS), or needs gradients that can't
            be exchanged (SparseAdam).
    """

    def __init__(self, optimizer: Optimizer, buckets: Sequence[Bucket]) -> None:
        if isinstance(optimizer, optim.LBFGS):
            raise ConfigError(
                "LBFGS evaluates the loss several times per step, which is not supported: use an "
                "optimizer that needs one gradient evaluation per step."
            )
        if isinstance(optimizer, optim.SparseAdam):
            raise ConfigError(
                "SparseAdam takes sparse gradients only, which can't be exchanged: use Adam, and "
                "layers with sparse=False."
            )
        if type(optimizer) in ELEMENTWISE:
            self._units: list[tuple[Bucket, ...]] = [(bucket,) for bucket in buckets]
        else:
            self._units = [tuple(buckets)] * len(buckets)
        self._guard = WriteGuard(buckets, late_write)
        self._sub_optimizers = {
            unit: SubOptimizer(optimizer, {p: b.param_group for b in unit for p in b.parameters})
            for unit in dict.fromkeys(self._units)
        }

    def unit(self, bucket: Bucket) -> tuple[Bucket, ...]:
        """The buckets that must be updated together with `bucket`, itself included."""
        return self._units[bucket.index]

    def freeze(self) -> None:
        """Take the optimizer's present hyperparameters for the updates to come."""
        self._guard.note_parameters()
        for sub_optimizer in self._sub_optimizers.values():
            sub_optimizer.freeze()

    def update(self, unit: tuple[Bucket, ...], gradients: Sequence[Tensor | None]) -> None:
        """Update a unit's parameters from the means of their gradients, in the unit's order.

        The parameters' own `.grad` are as before afterwards.

        Raises:
            ConfigError: a parameter was written since `freeze`, which the update would undo.
        """
        self._guard.check_parameters(unit)
        device = unit[0].parameters[0].device.type
        # An update runs in whatever block reads first: an evaluation's, one under autocast.
        if _is_plain(device):
            self._sub_optimizers[unit].step(gradients)
        else:
            with torch.inference_mode(False), torch.autocast(device, enabled=False):
                self._sub_optimizers[unit].step(gradients)


class SubOptimizer:
    """Sub-optimizer: torch's optimizer over some of the parameters.

    Args:
        optimizer: the user's optimizer, of all parameters.
        param_groups: for each of the parameters, the index of its group in the user's optimizer.
        state: optimizer state of these parameters; None: the user's optimizer holds it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        param_groups: Mapping[nn.Parameter, int],
        state: dict[Tensor, Any] | None = None,
    ) -> None:
        self._optimizer, self._state = optimizer, state
        self._parameters = list(param_groups)
        self._copies = type(optimizer) not in ELEMENTWISE  # it may write gradients, or retain them
        self._sub: Optimizer = object.__new__(type(optimizer))
        self._sub.__dict__.update(optimizer.__dict__)
        self._sub.__dict__.pop("step", None)  # schedulers and Paceline wrap the instance's
        self._sub._optimizer_step_pre_hooks = OrderedDict()
        self._sub._optimizer_step_post_hooks = OrderedDict()
        self._indices = sorted(set(param_groups.values()))
        self._sub.param_groups = [
            {
                "params": [p for p, group in param_groups.items() if group == index],
                **_hyperparameters(optimizer.param_groups[index]),
            }
            for index in self._indices
        ]

    def freeze(self) -> None:
        """Take the optimizer's present hyperparameters for the next step."""
        sub, optimizer = self._sub, self._optimizer
        sub.state = (  # load_state_dict() makes a new one
            optimizer.state if self._state is None else self._state  # type: ignore[assignment]
        )
        for name in _SCALING:
            setattr(sub, name, getattr(optimizer, name, None))
        for index, group in zip(self._indices, sub.param_groups, strict=True):
            group.update(_hyperparameters(optimizer.param_groups[index]))

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Update from gradients, one a parameter; the parameters' own `.grad` are as before.

        Hyperparameters that the update itself changes (some optimizers count steps there) are
        changed in the user's optimizer, too.
        """
        if self._step_fused(gradients):
            return
        own = [p.grad for p in self._parameters]
        for p, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None or gradient is p.grad or not self._copies:
                p.grad = gradient
            else:
                p.grad = gradient.clone()  # other ranks read it, and the next sum is written there
        before = [dict(group) for group in self._sub.param_groups]
        _unhooked_step(self._sub)
        for index, group, old in zip(self._indices, self._sub.param_groups, before, strict=True):
            if group.get("fused"):
                increment_version(group["params"])  # which torch's fused kernels don't
            changed = {name: value for name, value in group.items() if value is not old.get(name)}
            self._optimizer.param_groups[index].update(changed)
        for p, gradient in zip(self._parameters, own, strict=True):
            p.grad = gradient

    def _step_fused(self, gradients: Sequence[Tensor | None]) -> bool:
        """Update by torch's fused SGD, one pass over the memory instead of four, where possible.

        The fused kernel needs the gradients of all parameters. It needs the momenta of all or of
        none; the optimizer's own first step makes them. All must lie in memory as their parameters
        do.

        Returns:
            whether the update is done.
        """
        sub, group = self._sub, self._sub.param_groups[0]
        if type(sub) is not SGD or len(sub.param_groups) > 1 or not _may_fuse(group):
            return False
        parameters, momenta = group["params"], []
        if group["momentum"] != 0:
            momenta = [sub.state[p].get("momentum_buffer") for p in parameters]
        if not _lie_as(parameters, gradients, momenta):
            return False
        with torch.no_grad():
            sgd(
                parameters,
                gradients,  # type: ignore[arg-type]  # all are there
                momenta or [None] * len(parameters),
                fused=True,
                grad_scale=getattr(sub, "grad_scale", None),
                found_inf=getattr(sub, "found_inf", None),
                **{name: group[name] for name in _HYPERPARAMETERS},
            )
        increment_version(parameters)  # which torch's fused kernels don't
        return True


def _may_fuse(group: Mapping[str, Any]) -> bool:
    """Tell whether the group leaves the choice of the kernel open."""
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


def _is_plain(device: str) -> bool:
    """Tell whether no block is around that changes what operations do."""
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled(device)
    )


def _unhooked_step(optimizer: Optimizer) -> None:
    """Update without the hooks of every optimizer's step, which are for the user's optimizers."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # by torch, in the optimizer's constructor
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)


def _hyperparameters(group: dict[str, object]) -> dict[str, object]:
    """Copy a parameter group without its parameters; a tensor (a learning rate) is cloned."""
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
