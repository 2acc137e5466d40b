"""Detector of a script's writes to parameters between two updates, which other processes make.

Autograd's counts find most writes. What is written through `.data`, or an alias of it, leaves no
count, so the sums of the values' bits are compared, too: two passes over the parameters a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.reduce.buckets import Bucket
from paceline.update.divided_optimizer import flat_of

_WIDE = 8  # bytes
_Mark = tuple[int, int, int]  # a parameter's version, address, and the sum of its bits


class ParameterWrites:
    """Detector of writes to parameters.

    Args:
        buckets: the parameters' buckets; all of them count as written at first.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._noted: dict[int, list[_Mark]] = {}

    def note(self, bucket: Bucket) -> None:
        """Take a bucket's present values as those that were installed."""
        self._noted[bucket.index] = _marks(bucket)

    def written(self) -> list[Bucket]:
        """Return the buckets whose values aren't those that were installed."""
        return [b for b in self._buckets if self._noted.get(b.index) != _marks(b)]


def _marks(bucket: Bucket) -> list[_Mark]:
    return [(p._version, p.data_ptr(), _sum_of_bits(p)) for p in bucket.parameters]


def _sum_of_bits(parameter: Tensor) -> int:
    """Sum a parameter's bits, 8 bytes at a time, which is as fast as memory."""
    flat = flat_of(parameter)
    if flat.storage_offset() * flat.element_size() % _WIDE:
        flat = flat.clone()  # it isn't aligned
    data = flat.view(torch.uint8)
    wide = data.numel() // _WIDE * _WIDE
    return int(data[:wide].view(torch.int64).sum()) + int(data[wide:].sum())
