"""Momenta: entries of an optimizer's state that can be averaged over workers, as weights are.

They have their parameter's shape; torch calls those of Adam *moments*. Most are linear recurrences:
an update multiplies what it finds by a number of the parameter's group, the decay, and adds
something of the gradient.

    momentum_buffer = momentum * momentum_buffer + gradient

Maxima (`exp_inf` of Adamax, `max_exp_avg_sq` of AMSGrad) are merged by the same formula, which is
approximate for them.

Other entries, such as step counts and the rows and columns of Adafactor, are this worker's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import ConfigError, Message
from paceline.reduce.buckets import Bucket, like
from paceline.state.state_copy import copy_state

Options = Mapping[str, Any]

DECAYS: Mapping[str, Callable[[Options], Any]] = {
    "momentum_buffer": lambda options: options["momentum"],
    "exp_avg": lambda options: options["betas"][0],
    "exp_avg_sq": lambda options: options["betas"][1],
    "exp_inf": lambda options: options["betas"][1],
    "max_exp_avg_sq": lambda options: 1.0,
    "square_avg": lambda options: options["alpha"] if "alpha" in options else options["rho"],
    "grad_avg": lambda options: options["alpha"],
    "acc_delta": lambda options: options["rho"],
    "sum": lambda options: 1.0,
}
"""Decay of each entry: what an update of torch's multiplies it by, from its group's options."""

# An entry is taken for a momentum by its shape, and
# with two sizes alike a transposed one would pass.
_SIZES = (2, 3, 5, 7, 11, 13)  # of a small parameter; no two alike


class MomentumValues:
    """Values of one entry of the optimizer's state of a bucket's parameters.

    Args:
        optimizer: has them; before a parameter's first update it has none.
        index: of the parameters' group, whose options may change.
        entry: the entry's name in the state.
        names: of the parameters.
        first: for each parameter, the state of a small one after an update, from which that of a
            parameter is made that only other workers have updated.

    Attributes:
        lengths: numbers of values.
        dtype: theirs.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        index: int,
        entry: str,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        first: Sequence[Mapping[str, Any]],
    ) -> None:
        self._optimizer = optimizer
        self._index = index
        self._entry = entry
        self._parameters = tuple(parameters)
        self._first = tuple(first)
        self.names = tuple(f"{entry} of {name}" for name in names)
        self.lengths = tuple(p.numel() for p in parameters)
        self.dtype: torch.dtype = first[0][entry].dtype

    @property
    def decay(self) -> float:
        """What an update multiplies the values by, with the present options."""
        return float(DECAYS[self._entry](self._optimizer.param_groups[self._index]))

    @torch.no_grad()
    def read(self, flat: Tensor) -> None:
        """Copy the values to `flat`, (sum of the lengths,); 0 where there are none yet."""
        for p, part in self._parts(flat):
            value = self._optimizer.state.get(p, {}).get(self._entry)
            if value is None:
                part.zero_()
            else:
                part.copy_(value.to_dense() if value.layout is not torch.strided else value)

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Copy `flat` into the optimizer's state; zeros make no state where there is none."""
        for (p, part), first in zip(self._parts(flat), self._first, strict=True):
            entries: MutableMapping[str, Any] = self._optimizer.state.get(p, {})
            own = entries.get(self._entry)
            if own is not None and own.layout is torch.strided:
                own.copy_(part)
            elif own is not None or part.any():
                if not entries:
                    self._optimizer.state[p] = entries = self._new_entries(p, first)
                entries[self._entry] = part.clone()

    def _parts(self, flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        parts = zip(self._parameters, flat.split(self.lengths), strict=True)
        return [(p, like(p, part)) for p, part in parts]

    def _new_entries(self, parameter: Tensor, first: Mapping[str, Any]) -> dict[str, Any]:
        """Make the state of a parameter that has had one update, whose gradient was 0."""
        shape = first[self._entry].shape
        return {
            name: torch.zeros_like(parameter, dtype=value.dtype)
            if isinstance(value, Tensor) and value.shape == shape
            else copy_state(value)
            for name, value in first.items()
        }


def find_momenta(optimizer: Optimizer, buckets: Sequence[Bucket]) -> list[list[MomentumValues]]:
    """Find the momenta of each bucket's parameters.

    Before its first step an optimizer has no state. So small parameters with the same options show
    what it will have.

    Raises:
        ConfigError: the optimizer has none, or can't be tried.
    """
    tried: dict[tuple[int, int], dict[str, Any]] = {}

    def first_state(group: int, parameter: Tensor) -> dict[str, Any]:
        # Options are the group's, and the kind of an entry may depend on the number of dimensions
        # (Adafactor's does), but on no size: one try serves for all parameters of a kind.
        key = group, parameter.dim()
        if key not in tried:
            tried[key] = _state_after_a_step(optimizer, optimizer.param_groups[group], parameter)
        return tried[key]

    found = []
    for bucket in buckets:
        first = [first_state(bucket.param_group, p) for p in bucket.parameters]
        values = []
        for entry in DECAYS:
            indices = [i for i, state in enumerate(first) if entry in state]
            if indices:
                values.append(
                    MomentumValues(
                        optimizer,
                        bucket.param_group,
                        entry,
                        [bucket.parameters[i] for i in indices],
                        [bucket.names[i] for i in indices],
                        [first[i] for i in indices],
                    )
                )
        found.append(values)
    if not any(found):
        raise _refusal(
            f"{type(optimizer).__name__} with its present options has no momenta, such as a "
            "momentum_buffer or exp_avg"
        )
    return found


def _state_after_a_step(optimizer: Optimizer, group: Options, parameter: Tensor) -> dict[str, Any]:
    """Return the state of a small parameter after an update; momenta of other shapes are left out.

    Raises:
        ConfigError: no other optimizer of this class can be made, or it needs more than gradients.
    """
    # A small one: a twin over the model's own parameter would allocate its whole state again.
    small = nn.Parameter(parameter.new_zeros(_SIZES[: parameter.dim()]))
    small.grad = torch.zeros_like(small)
    options = {name: value for name, value in group.items() if name != "param_names"}
    try:
        twin = type(optimizer)([{**options, "params": [small]}])  # type: ignore[call-arg]
        twin.step()
    except Exception as error:
        name = type(optimizer).__name__
        raise _refusal(
            f"{name} was tried with a small parameter, to find its momenta, and failed: {error}"
        ) from error
    return {
        name: value
        for name, value in twin.state.get(small, {}).items()
        if name not in DECAYS or (isinstance(value, Tensor) and value.shape == small.shape)
    }


def _refusal(rule: str) -> ConfigError:
    return ConfigError(
        flag="average_momenta",
        value="average",
        rule=rule,
        remedy=Message("use {--average_momenta} keep"),
    )
