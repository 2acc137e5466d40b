"""Copies of state dicts in this machine's memory, which may be reused for the next copy."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

_VALUES = frozenset({str, int, float, bool, type(None)})  # types of values that never change


def copy_state(state: Any, into: Any = None, *, pinned: bool = False) -> Any:
    """Copy a tree of dicts, lists, tuples, tensors and values; tensors go to this machine's memory.

    Tensors keep their strides (channels-last weights and momenta), so that a resumed run computes
    in the same layouts. All are copied by one call, since a tree may have hundreds of small ones.

    Args:
        state: what a `state_dict()` returned.
        into: an earlier copy that is no longer needed: its tensors are overwritten where their
            shapes and dtypes fit.
        pinned: copy a GPU's tensors to pinned memory, without waiting: a copy is complete when the
            present stream of the tensor's GPU has done its work so far.
    """
    copies: list[Tensor] = []
    sources: list[Tensor] = []

    def copied(state: Any, into: Any) -> Any:
        """Return the tree's copy, whose tensors are listed and have their values later."""
        # Its number of entries varies, so the memory of the last copy rarely fits.
        if isinstance(state, Tensor) and state.layout is not torch.strided:  # sparse, say
            return state.detach().to("cpu", copy=True)
        if isinstance(state, Tensor):
            fits = (
                isinstance(into, Tensor)
                and into.layout is torch.strided
                and into.shape == state.shape
                and into.dtype == state.dtype
                and into.stride() == state.stride()
            )
            if not fits:
                into = torch.empty_like(state, device="cpu", pin_memory=pinned and state.is_cuda)
            copies.append(into)
            sources.append(state)
            return into
        if type(state) in _VALUES:
            return state
        if isinstance(state, dict | Mapping):
            # An optimizer has such a dict for each group, and a sampler long lists of numbers:
            # nothing in them is to be copied one by one.
            if _VALUES.issuperset(map(type, state.values())):
                return dict(state)
            old = into if isinstance(into, dict) else {}
            return {key: copied(value, old.get(key)) for key, value in state.items()}
        if isinstance(state, list | tuple):
            if _VALUES.issuperset(map(type, state)):
                return tuple(state) if isinstance(state, tuple) else list(state)
            olds = chain(into if isinstance(into, list | tuple) else (), repeat(None))
            values = [copied(*pair) for pair in zip(state, olds, strict=False)]
            return tuple(values) if isinstance(state, tuple) else values
        if isinstance(state, np.generic):
            return state.item()  # which a checkpoint can have
        return deepcopy(state)

    tree = copied(state, into)
    if sources:
        with torch.no_grad():
            # All at once: a model has hundreds of tensors,
            # whose copies by one call each are mostly overhead.
            torch._foreach_copy_(copies, sources, non_blocking=pinned)
    return tree


def finite(state: Any) -> bool:
    """Return whether all floating-point values of a tree are finite."""
    if isinstance(state, Tensor):
        return not state.is_floating_point() or bool(torch.isfinite(state.sum(dtype=torch.float64)))
    if isinstance(state, Mapping):
        return all(finite(value) for value in state.values())
    if isinstance(state, list | tuple):
        return all(finite(value) for value in state)
    return True
