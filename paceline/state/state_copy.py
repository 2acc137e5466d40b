"""Copies of state dicts in this machine's memory, which may be reused for the next copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def copy_state(state: Any, into: Any = None, *, pinned: bool = False) -> Any:
    """Copy a tree of dicts, lists, tuples, tensors and values; tensors go to this machine's memory.

    Tensors keep their strides (channels-last weights and momenta), so that a resumed run computes
    in the same layouts.

    Args:
        state: what a `state_dict()` returned.
        into: an earlier copy that is no longer needed: its tensors are overwritten where their
            shapes and dtypes fit.
        pinned: copy a GPU's tensors to pinned memory, without waiting: a copy is complete when the
            present stream of the tensor's GPU has done its work so far.
    """
    if isinstance(state, Tensor):
        tensor = state.detach()
        pinned = pinned and tensor.is_cuda
        fits = (
            isinstance(into, Tensor)
            and into.shape == tensor.shape
            and into.dtype == tensor.dtype
            and into.stride() == tensor.stride()
        )
        if not fits:
            into = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        return into.copy_(tensor, non_blocking=pinned)
    if isinstance(state, Mapping):
        old = into if isinstance(into, Mapping) else {}
        return {key: copy_state(value, old.get(key), pinned=pinned) for key, value in state.items()}
    if isinstance(state, list | tuple):
        olds = into if isinstance(into, list | tuple) and len(into) == len(state) else ()
        copies = [
            copy_state(value, olds[index] if olds else None, pinned=pinned)
            for index, value in enumerate(state)
        ]
        return tuple(copies) if isinstance(state, tuple) else copies
    return state


def finite(state: Any) -> bool:
    """Tell whether all floating-point values of a tree are finite."""
    if isinstance(state, Tensor):
        return not state.is_floating_point() or bool(torch.isfinite(state.sum(dtype=torch.float64)))
    if isinstance(state, Mapping):
        return all(finite(value) for value in state.values())
    if isinstance(state, list | tuple):
        return all(finite(value) for value in state)
    return True
