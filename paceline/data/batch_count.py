"""Number of samples in a collated batch, where its form shows it.

    (images, labels)          tensors of one length: that of the batch
    {"ids": …, "mask": …}     likewise
    [sample, sample, …]       a list of samples: its own length
    (ids, offsets)            tensors of several lengths, none of them expected: unknown

Collation may give a batch any form. Where the form leaves a doubt, the expected number holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

_FIELDS = 4  # a list of up to so many values is taken for the parts of a batch, not for samples
_DEPTH = 4


def samples_in(batch: object, expected: int) -> int:
    """Return the number of samples of a batch; `expected` where it has as many, or is unknown.

    Args:
        batch: what `collate_fn` returned; None has no samples.
        expected: the number of samples that `collate_fn` was given.
    """
    if batch is None:
        return 0
    sizes = _sizes(batch, expected, _DEPTH, top=True)
    if sizes is None or expected in sizes:
        return expected
    return max((size for size in sizes if size < expected), default=expected)


def _sizes(value: Any, expected: int, depth: int, *, top: bool = False) -> set[int] | None:
    """Return the numbers of samples that a value may have; None: unknown by its form."""
    if isinstance(value, Tensor | np.ndarray):
        if not value.ndim:
            return None
        second = value.ndim > 1 and value.shape[1] == expected  # time first, samples second
        return {value.shape[0], expected} if second else {value.shape[0]}
    if not depth or isinstance(value, str | bytes | type):
        return None
    if isinstance(value, list | tuple):
        return _sizes_of_list(value, expected, depth, top=top)
    parts = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
    return None if parts is None else _common(parts.values(), expected, depth)


def _sizes_of_list(
    values: list[Any] | tuple[Any, ...], expected: int, depth: int, *, top: bool
) -> set[int] | None:
    common = _common(values, expected, depth)
    if top and 0 < len(values) <= _FIELDS:
        return common
    return {len(values)} | (common or set())  # a list of samples, say


def _common(values: Iterable[Any], expected: int, depth: int) -> set[int] | None:
    """Return the numbers of samples that all values may have; None: they don't agree."""
    found = [_sizes(value, expected, depth - 1) for value in values]
    known = [sizes for sizes in found if sizes is not None]
    return set.intersection(*known) or None if known else None
