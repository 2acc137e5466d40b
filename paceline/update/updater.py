"""Updates a bucket by torch's optimizer; the lists of optimizers that may update bucket by bucket.

Each bucket has a sub-optimizer: an object of the optimizer's own class that knows only this
bucket's parameters and shares the optimizer's state. So the update is torch's own, the state is
where `optimizer.state_dict()` looks for it, and a bucket is updated as soon as its gradients
have arrived. That is right for torch's optimizers that update each parameter from its own gradient
and state. Any other optimizer is stepped by its own `step()`, once all gradients have arrived.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.autograd.graph import increment_version
from torch.optim import SGD, Optimizer

from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket
from paceline.update.parameter_watch import ParameterGuard
from paceline.update.state_watch import plain_state

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
"""Torch's optimizers that update each value from its own gradient and state."""

BUCKETWISE = ELEMENTWISE | {optim.Adafactor, optim.Muon, optim.SparseAdam}
"""Torch's optimizers that update each parameter from its own gradient and state."""

_DENSE_ONLY = BUCKETWISE - {optim.SGD, optim.Adagrad, optim.SparseAdam}

# What a GradScaler sets for the time of a fused optimizer's step, which unscales or skips itself.
_SCALING = ("grad_scale", "found_inf")
_STRIDE: Any = Tensor.stride
_DTYPE = attrgetter("dtype")
_FUSED = (torch.float32, torch.float64)
_HYPERPARAMETERS = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")


@dataclass(frozen=True, kw_only=True)
class StepHyperparameters:
    """Hyperparameters of a step: an optimizer's options when its `step()` is called.

    They are plain values and tensors, so that they can be sent to an owner of parameters that has
    no optimizer of its own.

    Attributes:
        groups: for each parameter group, its options without the parameters; tensors are copies.
        scaling: what a GradScaler sets for the step of a fused optimizer.
    """

    groups: tuple[dict[str, Any], ...]
    scaling: dict[str, Any]

    @staticmethod
    def of(optimizer: Optimizer) -> StepHyperparameters:
        """Take an optimizer's present ones."""
        groups = tuple(
            {
                # A learning rate may be a tensor, which schedulers
                # write in place before the update is made.
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in optimizer.param_groups
        )
        scaling = {name: getattr(optimizer, name, None) for name in _SCALING}
        return StepHyperparameters(groups=groups, scaling=scaling)


class _OnEachRank:
    """What is common to updates by which every rank updates its whole copy of the model."""

    installs_sums = True

    def return_sums(self) -> None:
        """Do nothing: sums return at once."""

    def close(self) -> None:
        """Hold nothing."""


class Updater(_OnEachRank):
    """Updater of all parameters from reduced gradients, bucket by bucket.

    Args:
        optimizer: the user's optimizer, of a class in `BUCKETWISE`.
        buckets: the buckets of all exchanged parameters.
    """

    def __init__(self, optimizer: Optimizer, buckets: Sequence[Bucket]) -> None:
        self._optimizer = optimizer
        self._units: list[tuple[Bucket, ...]] = [(bucket,) for bucket in buckets]
        self._guard = ParameterGuard(buckets)
        self._sub_optimizers = [
            SubOptimizer(optimizer, dict.fromkeys(bucket.parameters, bucket.param_group))
            for bucket in buckets
        ]

    def unit(self, bucket: Bucket) -> tuple[Bucket, ...]:
        """The buckets that must be updated together with `bucket`: itself alone."""
        return self._units[bucket.index]

    def freeze(self, *, reduced: bool = False, deferred: bool = True) -> Mapping[int, int]:
        """Take the optimizer's present hyperparameters for the updates to come.

        Args:
            reduced: the sums have returned already.
            deferred: a script may write the parameters before their updates.
        """
        if deferred:
            self._guard.note()
        hyperparameters = StepHyperparameters.of(self._optimizer)
        for sub_optimizer in self._sub_optimizers:
            # One object for all buckets: they are read at
            # one moment, however late a bucket is updated.
            sub_optimizer.freeze(hyperparameters)
        return {}

    def update(self, unit: tuple[Bucket, ...], gradients: Sequence[Tensor | None]) -> None:
        """Update a unit's parameters from the means of their gradients, in the unit's order.

        The parameters' own `.grad` are as before afterwards.

        Raises:
            ConfigError: a parameter was written since `freeze`, which the update would undo.
        """
        (bucket,) = unit
        self._guard.check(unit)
        device = bucket.parameters[0].device.type
        # An update runs in whatever block reads first: an evaluation's, one under autocast.
        if _is_plain(device):
            self._sub_optimizers[bucket.index].step(gradients)
        else:
            with torch.inference_mode(False), torch.autocast(device, enabled=False):
                self._sub_optimizers[bucket.index].step(gradients)


class SparseUpdater(Updater):
    """Updater of parameters of which some get sparse gradients, which options may not allow."""

    def update(self, unit: tuple[Bucket, ...], gradients: Sequence[Tensor | None]) -> None:
        """Update as `Updater` does.

        Raises:
            ConfigError: a parameter was written since `freeze`; or the optimizer, with its present
                options, doesn't take the layout of a table's gradient.
        """
        (bucket,) = unit
        if not bucket.row_sparse:
            super().update(unit, gradients)
            return
        try:
            super().update(unit, gradients)
        except (RuntimeError, NotImplementedError) as error:
            layout = "sparse" if any(g is not None and g.is_sparse for g in gradients) else "dense"
            kind = type(self._optimizer).__name__
            raise ConfigError(
                f"{kind} could not update {bucket.names[0]} from its {layout} gradient "
                f"({str(error).rstrip('.')}): change the options of its parameter group, or create "
                "the layer with sparse=False."
            ) from error


class OwnStep(_OnEachRank):
    """Updater that leaves all to the optimizer's own `step()`, which the replica calls.

    Args:
        buckets: the buckets of all exchanged parameters.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(buckets)

    def unit(self, bucket: Bucket) -> tuple[Bucket, ...]:
        """All buckets: they are updated together."""
        return self._buckets

    def freeze(self, *, reduced: bool, deferred: bool) -> Mapping[int, int]:
        """Do nothing: the step has been made."""
        return {}

    def update(self, unit: tuple[Bucket, ...], gradients: Sequence[Tensor | None]) -> None:
        """Do nothing: the step has been made."""


def make_updater(optimizer: Optimizer, buckets: Sequence[Bucket]) -> Updater | OwnStep:
    """Make the updater of an optimizer's parameters.

    Raises:
        ConfigError: the optimizer evaluates the loss itself (LBFGS), or takes sparse gradients only
            (SparseAdam) and has parameters of other layers.
    """
    if isinstance(optimizer, optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates the loss several times per step, which is not supported: use an "
            "optimizer that needs one gradient evaluation per step."
        )
    if isinstance(optimizer, optim.SparseAdam):
        dense = [name for bucket in buckets if not bucket.row_sparse for name in bucket.names]
        if dense:
            raise ConfigError(
                f"SparseAdam takes sparse gradients only, and {dense[0]} is not the weight of an "
                "nn.Embedding or nn.EmbeddingBag with sparse=True alone: use SGD or Adagrad for "
                "all parameters, or Adam and sparse=False."
            )
    if not is_bucketwise(optimizer):
        return OwnStep(buckets)
    sparse = any(bucket.row_sparse for bucket in buckets)
    return SparseUpdater(optimizer, buckets) if sparse else Updater(optimizer, buckets)


def takes_sparse_gradients(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may take sparse gradients: SGD, Adagrad, SparseAdam, a user's."""
    return type(optimizer) not in _DENSE_ONLY


def is_bucketwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may update bucket by bucket: torch's, with an unpatched step.

    Torch's and Paceline's own wrappers of `step` (schedulers', profilers') don't count as patches.
    """
    step: Any = optimizer.step
    while step is not None:
        step = getattr(step, "__func__", step)  # a bound method's
        module = getattr(step, "__globals__", {}).get("__name__", "")
        if module.partition(".")[0] not in ("torch", "paceline"):
            return False
        step = getattr(step, "__wrapped__", None)
    return type(optimizer) in BUCKETWISE


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
        self._optimizer = optimizer
        self._state = state
        self._places: list[Any] = []  # strides and dtypes with which a fused update was possible
        self._momenta: list[Any] = []  # and momenta
        self._parameters = list(param_groups)
        self._sub: Optimizer = object.__new__(type(optimizer))
        self._sub.__dict__.update(optimizer.__dict__)
        self._sub.__dict__.pop("step", None)  # schedulers and Paceline wrap the instance's
        self._sub._optimizer_step_pre_hooks = OrderedDict()
        self._sub._optimizer_step_post_hooks = OrderedDict()
        self._indices = sorted(set(param_groups.values()))
        self._sub.param_groups = [
            {"params": [p for p, group in param_groups.items() if group == index]}
            for index in self._indices
        ]

    def freeze(self, hyperparameters: StepHyperparameters) -> None:
        """Take the hyperparameters for the next step."""
        sub = self._sub
        own = self._state
        if own is None:
            own = plain_state(self._optimizer)  # load_state_dict() makes a new one
        sub.state = own  # type: ignore[assignment]
        vars(sub).update(hyperparameters.scaling)
        for index, group in zip(self._indices, sub.param_groups, strict=True):
            group.update(hyperparameters.groups[index])

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Update from gradients, one a parameter; the parameters' own `.grad` are as before."""
        if self._step_fused(gradients):
            return
        # The next backward may already have begun to add to these, so they are put back.
        own = [p.grad for p in self._parameters]
        for p, gradient in zip(self._parameters, gradients, strict=True):
            p.grad = gradient
        _unhooked_step(self._sub)
        for group in self._sub.param_groups:
            if group.get("fused"):
                increment_version(group["params"])  # which torch's fused kernels don't
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
        sub = self._sub
        group = self._sub.param_groups[0]
        if type(sub) is not SGD or len(sub.param_groups) > 1 or not _may_fuse(group):
            return False
        parameters = group["params"]
        momenta = []
        if group["momentum"] != 0:
            momenta = [sub.state[p].get("momentum_buffer") for p in parameters]
        try:
            places = [*map(_STRIDE, parameters), *map(_STRIDE, gradients), *map(_DTYPE, gradients)]
        except TypeError:  # a gradient is missing
            return False
        seen = self._momenta
        same = len(momenta) == len(seen) and all(map(is_, momenta, seen))
        # What the full check reads of each tensor changes
        # only with these, so that most steps skip it.
        if not same or places != self._places:
            if not _lie_as(parameters, gradients, momenta):
                return False
            self._places = places
            self._momenta = momenta
        scaling = {name: getattr(sub, name, None) for name in _SCALING}
        for name, value in scaling.items():
            scaling[name] = None if value is None else value.to(parameters[0].device)
        options = {name: group[name] for name in _HYPERPARAMETERS}
        with torch.no_grad():  # as `sgd(…, fused=True)`, which would sort them by device and dtype
            torch._fused_sgd_(  # type: ignore[call-overload]  # all gradients are there
                parameters, gradients, momenta, is_first_step=False, **options, **scaling
            )
        increment_version(parameters)  # which torch's fused kernels don't
        return True


def _may_fuse(group: Mapping[str, Any]) -> bool:
    """Return whether the group leaves the choice of the kernel open."""
    chosen = group["foreach"] is not None or group["fused"] not in (None, True)
    return not chosen and not group["differentiable"]


def _lie_as(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    momenta: Sequence[Tensor | None],
) -> bool:
    """Return whether gradients, and momenta, if any, lie as their parameters, without gaps."""
    dtype = parameters[0].dtype
    for p, gradient, momentum in zip(parameters, gradients, momenta or parameters, strict=True):
        if gradient is None or momentum is None:
            return False
        if not (p.layout is gradient.layout is momentum.layout is torch.strided):
            return False
        if not (p.dtype is gradient.dtype is momentum.dtype is dtype):
            return False
        shape = p.shape
        stride = p.stride()
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
        # The stride of one value is never used, and torch gives it any number.
        if size == 1:
            continue
        if step != expected:
            return None
        expected *= size
    return tuple(step for step, size in places if size != 1)


def _is_plain(device: str) -> bool:
    """Return whether no block is around that changes what operations do."""
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled(device)
    )


def _unhooked_step(optimizer: Optimizer) -> None:
    """Update without the hooks of every optimizer's step, which are for the user's optimizers."""
    step = type(optimizer).step
    # Otherwise it would run once a bucket.
    if getattr(step, "hooked", False):  # by torch, in the optimizer's constructor
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)
