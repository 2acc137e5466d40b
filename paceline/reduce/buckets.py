"""Buckets: flat ranges of parameters, the unit of communication.

The partition is a pure function of the parameters' order, sizes, dtypes, devices and parameter
groups, so all ranks have the same. Backward completes gradients from the last layer to the first,
so buckets are filled in that order, and numbered by when they can be complete:

    parameters   a1 a2 │ b1 │ c1 c2 c3          (forward order)
    buckets       2  1 │  1 │  1  0  0          (sizes permitting)

The next forward reads the first layers first, and their bucket is complete last, when no
computation is left to hide its exchange. So buckets get smaller towards the first layers.

A parameter whose gradient is row-sparse has a bucket of its own, behind all others.

A bucket's flat memory holds the gradients and behind them, for each parameter, the number of
ranks that used it: a parameter that no rank used keeps `grad = None`.

    flat: (numel + parameters,)    [ gradient | gradient | … | used | used | … ]
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

ALL = sys.maxsize  # bytes of a bucket: nothing travels, so that larger ones cost no waiting
_SMALLEST = 2**19  # bytes; smaller buckets cost more work than they save waiting
_FEW_VALUES = 2**13  # of a tensor; to pass over them again takes less than a call on a CPU
_TIMES_BYTES_BEFORE = 3  # a bucket has at most 3 times the bytes before it, in forward order


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """Bucket: parameters of one dtype, device and parameter group that are exchanged together.

    Attributes:
        index: the bucket's number; bucket 0 is the first that backward can complete.
        param_group: the index of the parameters' group in the optimizer.
        parameters: the parameters, those of the last layer first.
        names: the parameters' names, for messages.
        row_sparse: whether the bucket is one parameter whose gradient is row-sparse.
    """

    index: int
    param_group: int
    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    row_sparse: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class BucketMemory:
    """Flat buffer of a bucket, with one gradient view per parameter.

    Attributes:
        flat: (numel + parameters,), the gradients and `used`, which are exchanged together.
        gradients: one view of `flat` per parameter, of the parameter's shape and strides (also
            channels-last).
        used: (parameters,), a view of `flat`: the number of ranks that used each parameter.
    """

    flat: Tensor
    gradients: tuple[Tensor, ...]
    used: Tensor

    @torch.no_grad()
    def pack(self, values: Sequence[Tensor | None], weight: float) -> None:
        """Write gradients, one a parameter, times `weight`; one that is None is 0.

        With weight 0 (a placeholder sample) all are 0, whatever they hold, and none counts as used.
        """
        pairs = zip(values, self.gradients, strict=True)
        given = [(one, view) for one, view in pairs if one is not None and weight]
        if len(given) < len(values):
            self.flat.zero_()
        if self.flat.device.type == "cpu" and self.flat.numel() > _FEW_VALUES * len(values):
            for one, view in given:
                torch.mul(one, weight, out=view)
        elif given:
            torch._foreach_copy_([view for _, view in given], [one for one, _ in given])
            self.flat[: -len(values)].mul_(weight)
        self.mark_used(values if weight else [None] * len(values))

    def reduced(self, used: Sequence[bool] | None = None) -> list[Tensor | None]:
        """Return the gradients after the exchange; None where no rank used the parameter.

        Args:
            used: whether any rank used each parameter, where this rank knows; otherwise the counts
                are read, for which the host waits if they are in a GPU's memory.
        """
        known = self.used.tolist() if used is None else used
        return [g if n else None for g, n in zip(self.gradients, known, strict=True)]

    @torch.no_grad()
    def mark_used(self, values: Sequence[Tensor | None]) -> None:
        """Count each parameter as used by one rank, or by none where its value is None."""
        self.used.fill_(1)
        for index, value in enumerate(values):
            if value is None:
                self.used[index].zero_()  # an assigned number would be copied from the host


def allocate(templates: Sequence[Tensor]) -> BucketMemory:
    """Allocate a buffer for values laid out as tensors of one dtype and device."""
    first = templates[0]
    numel = sum(template.numel() for template in templates)
    flat = torch.zeros(numel + len(templates), dtype=first.dtype, device=first.device)
    views = []
    offset = 0
    for template in templates:
        views.append(like(template, flat[offset : offset + template.numel()]))
        offset += template.numel()
    return BucketMemory(flat=flat, gradients=tuple(views), used=flat[offset:])


def like(parameter: Tensor, flat: Tensor) -> Tensor:
    """View `flat`, (numel,), in the shape and, where the parameter is dense, its strides."""
    if parameter.is_contiguous():
        return flat.view(parameter.shape)
    stride = parameter.stride()
    if torch.empty_like(parameter, device="meta").stride() == stride:
        return flat.as_strided(parameter.shape, stride)
    return flat.view(parameter.shape)


def partition(
    names: Mapping[nn.Parameter, str],
    param_groups: Mapping[nn.Parameter, int],
    bucket_bytes: int,
    row_sparse: Collection[nn.Parameter] = (),
) -> tuple[Bucket, ...]:
    """Partition trainable parameters into buckets of about `bucket_bytes`.

    Args:
        names: the model's parameters, in forward order, with their names; one in no group is left
            out.
        param_groups: the index of each parameter's group in the optimizer.
        bucket_bytes: a bucket is closed before it would exceed this, or, near the first layers,
            less; a larger parameter has a bucket of its own. With `ALL` none is closed before the
            last parameter of its group, dtype and device.
        row_sparse: parameters whose gradients are row-sparse.
    """
    every = [p for p in names if p.requires_grad and p in param_groups]
    trained = [p for p in every if p not in row_sparse]
    ends = accumulate(_bytes([p]) for p in trained)
    before = {p: end - _bytes([p]) for p, end in zip(trained, ends, strict=True)}
    closed: list[tuple[int, int, list[nn.Parameter]]] = []  # (last one's number, group, bucket)
    filling: dict[tuple[int, torch.dtype, torch.device], list[nn.Parameter]] = {}
    numbers = {}
    for number, p in enumerate(reversed(trained)):
        numbers[p] = number
        key = (param_groups[p], p.dtype, p.device)
        bucket = filling.setdefault(key, [])
        most = min(bucket_bytes, max(_SMALLEST, _TIMES_BYTES_BEFORE * before[p]))
        if bucket and bucket_bytes != ALL and _bytes([*bucket, p]) > most:
            closed.append((numbers[bucket[-1]], param_groups[p], bucket))
            bucket = filling[key] = []
        bucket.append(p)
    closed += [(numbers[bucket[-1]], key[0], bucket) for key, bucket in filling.items()]
    dense = [(group, bucket, False) for _, group, bucket in sorted(closed, key=lambda c: c[0])]
    tables = [(param_groups[p], [p], True) for p in reversed(every) if p in row_sparse]
    return tuple(
        Bucket(
            index=index,
            param_group=group,
            parameters=tuple(bucket),
            names=tuple(names[p] for p in bucket),
            row_sparse=sparse,
        )
        for index, (group, bucket, sparse) in enumerate([*dense, *tables])
    )


def mostly_tables(parameters: Sequence[Tensor], tables: Collection[Tensor]) -> bool:
    """Return whether more than half of the parameters' values are in tables.

    Args:
        parameters: a bucket's.
        tables: a set of parameters whose gradients may be zero but for some rows.
    """
    in_tables = sum(p.numel() for p in parameters if p in tables)
    return 2 * in_tables > sum(p.numel() for p in parameters)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
