"""Master weights: float32 values of parameters that the model stores in 16 bits.

    a step       master (float32, at its owner) -= lr * gradient        p = round(master)
    narrow       p.data (float32) ──▶ optimizer.state[p]["master"], p.data (16 bits)
    widen        the reverse, without what the 16 bits have rounded away, before a load

While nothing is bound, the masters are an entry of the optimizer's state; the owners of shards take
it from there. Matrices are narrowed and no other parameters: scales, shifts and biases are small,
and layers that normalise compute in float32.

A value that a script writes to a parameter becomes its master: a master which isn't rounded to the
parameter's present value is replaced (`renew`). So snapshots have the masters alone: the parameters
are rounded anew from them (`snapshots/narrow.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import ConfigError, Message
from paceline.update.state_watch import plain_state

MASTER = "master"  # entry of an optimizer's state of a parameter
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def is_narrow(parameter: Tensor) -> bool:
    """Return whether a parameter's dtype is one of 16 bits."""
    return parameter.dtype in NARROW.values()


def require_float32(names: Mapping[nn.Parameter, str], dtype: str) -> None:
    """Require parameters of float32, of which masters can be made.

    Raises:
        ConfigError: one has another dtype.
    """
    for p, name in names.items():
        if p.dtype is not torch.float32:
            raise ConfigError(
                Message(
                    "{--param_dtype} {} makes the masters of float32 parameters, but {} is {}: "
                    "leave the model in float32, which is narrowed when training begins.",
                    dtype,
                    name,
                    str(p.dtype).removeprefix("torch."),
                )
            )


@torch.no_grad()
def narrow(parameters: Iterable[nn.Parameter], optimizer: Optimizer, dtype: torch.dtype) -> None:
    """Store float32 matrices in 16 bits; their values become the optimizer's masters."""
    state = plain_state(optimizer)
    for p in parameters:
        if p.dim() >= 2 and p.dtype is torch.float32:
            state[p] = {**state.get(p, {}), MASTER: p.data}
            p.grad = None
            p.data = p.data.to(dtype)


@torch.no_grad()
def widen(parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> torch.dtype | None:
    """Store parameters in float32 again; return the dtype of those that were narrow, if any."""
    state = plain_state(optimizer)
    found = None
    for p in parameters:
        if is_narrow(p):
            found = p.dtype
            state.get(p, {}).pop(MASTER, None)
            p.grad = None
            p.data = p.data.float()
    return found


def renew(master: Tensor, values: Tensor) -> None:
    """Take the values that were written to a parameter since its master was rounded.

    Args:
        master: (values,), float32.
        values: (values,), the parameter's, narrow.
    """
    written = master.to(values.dtype) != values
    if written.any():
        master[written] = values[written].float()


def with_masters(
    model: dict[str, Any], optimizer: Mapping[str, Any], keys: Mapping[int, Sequence[str]]
) -> Mapping[str, Any]:
    """Move the masters of an optimizer's state dict to a model's state dict.

    So a file has both as they would be without masters.

    Args:
        model: the model's state dict, which is changed in place.
        optimizer: the optimizer's, which isn't.
        keys: the model's keys of each of the optimizer's numbers: several of tied parameters.

    Returns:
        the optimizer's state dict without masters; the same object where it has none.
    """
    masters = {
        number: own[MASTER]
        for number, own in optimizer.get("state", {}).items()
        if number in keys and isinstance(own, Mapping) and MASTER in own
    }
    if not masters:
        return optimizer
    model.update({key: master for number, master in masters.items() for key in keys[number]})
    state = {
        number: {name: value for name, value in own.items() if name != MASTER}
        if number in masters
        else own
        for number, own in optimizer["state"].items()
    }
    return {**optimizer, "state": state}
