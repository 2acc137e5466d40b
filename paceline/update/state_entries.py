"""Entries of an optimizer's state of one parameter, restored from a copy in the same tensors."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from paceline.state.state_copy import copy_state

SCALARS = frozenset({"step", "eta", "mu", "mu_product"})  # of a parameter, whatever its size


@torch.no_grad()
def restore_entries(
    entries: MutableMapping[Any, Any],
    saved: Mapping[Any, Any],
    parameter: Tensor,
    group: Mapping[str, Any],
) -> None:
    """Restore the entries of a parameter; newer ones are removed, and missing ones made.

    Args:
        entries: the optimizer's state of the parameter; its tensors are overwritten where shape,
            dtype and layout fit.
        saved: a copy of the entries, in the CPU's memory; it is not shared afterwards.
        parameter: the parameter, on whose device missing tensors are made, except `SCALARS`.
        group: the parameter's group in the optimizer. If it is `capturable` or `fused`, scalars are
            made on the parameter's device, too.
    """
    for name in [name for name in entries if name not in saved]:
        del entries[name]
    on_device = group.get("capturable") or group.get("fused")
    for name, value in saved.items():
        own = entries.get(name)
        if not isinstance(value, Tensor):
            entries[name] = copy_state(value)
        elif isinstance(own, Tensor) and _form(own) == _form(value):
            own.copy_(value)
        else:
            on_cpu = name in SCALARS and not on_device
            entries[name] = value.clone() if on_cpu else value.to(parameter.device, copy=True)


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.layout]:
    return tensor.shape, tensor.dtype, tensor.layout
