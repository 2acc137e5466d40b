"""Checksum of a map-style data set: ranks whose data sets differ have different ones.

    TensorDataset, arrays in attributes      up to 2^8 values of each
    lists and dicts of names and numbers     up to 2^8 entries: labels, indices, file names
    Subset, ConcatDataset, own wrappers      the same of the data sets inside

No sample is loaded for it. Of paths the last part counts, because machines have other folders.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import PurePath

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

_ENTRIES = 2**8  # that are looked at, of each attribute
_DEPTH = 4  # of data sets in data sets


def dataset_checksum(dataset: object) -> int:
    """Return the checksum of what a data set consists of, below 2^32; it may be of nothing."""
    total = 0
    for part in _parts(dataset, _DEPTH):
        total = zlib.crc32(part, total)
    return total


def _parts(value: object, depth: int) -> Iterator[bytes]:
    for name, each in sorted(getattr(value, "__dict__", {}).items()):
        if name.startswith("_") or "cache" in name:  # what a rank has read so far
            continue
        parts = list(_of_attribute(each, depth))
        if parts:
            yield name.encode()
            yield from parts


def _of_attribute(value: object, depth: int) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        if value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized:
            yield _sampled(value.detach())
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        yield value.flat[:: _stride(value.size)].tobytes()
    elif isinstance(value, Dataset):
        yield from _parts(value, depth - 1) if depth else ()
    elif isinstance(value, dict):
        yield _text(list(islice(value.items(), _ENTRIES)))
    elif isinstance(value, list | tuple | range):
        inner = [one for one in value[:_ENTRIES] if isinstance(one, Tensor | np.ndarray | Dataset)]
        for one in inner:
            yield from _of_attribute(one, depth)
        if not inner:
            yield _text(value[:: _stride(len(value))])


def _stride(size: int) -> int:
    # Odd: at least 1, and no multiple of a row's length where that is a power of two.
    return size // _ENTRIES | 1


def _sampled(tensor: Tensor) -> bytes:
    real = torch.view_as_real(tensor)[..., 0] if tensor.is_complex() else tensor
    values = torch.take(real, torch.arange(0, real.numel(), _stride(real.numel())))
    return values.double().numpy().tobytes()


def _text(entries: Sequence[object]) -> bytes:
    """Return names and numbers as bytes, and other entries as nothing."""
    return ";".join(map(_plain, entries)).encode(errors="replace")


def _plain(value: object) -> str:
    if isinstance(value, str):
        return PurePath(value).name
    if isinstance(value, PurePath):
        return value.name
    if isinstance(value, tuple | list):
        return ",".join(map(_plain, value[:_ENTRIES]))
    return repr(value) if isinstance(value, bool | int | float) else ""
