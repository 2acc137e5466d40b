"""The kernels as numba compiles them: one pass over memory, without the interpreter's lock.

Compiled code is told addresses: to make an array of a tensor, and to find out what kind of array it
is, would take longer than the work on a small piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.codecs.kernels import compiled_loops as loops
from paceline.codecs.kernels import plain as kernels_plain
from paceline.codecs.pieces import Piece, Source, cover

_KINDS = {torch.float32: np.float32, torch.float64: np.float64}


def add_up(
    parts: Sequence[Sequence[Piece]],
    weights: Sequence[float],
    out: Tensor,
    *,
    past_caches: bool = False,
) -> None:
    """See `kernels.py`."""
    kind = _KINDS.get(out.dtype)
    if kind is None:
        kernels_plain.add_up(parts, weights, out)
        return
    rows: list[int] = []
    firsts, counted = [], []
    for part, weight in zip(parts, weights, strict=True):
        if weight:
            assert cover(part, out.numel(), out.dtype)
            firsts.append(len(rows))
            counted.append(weight)
            for start, stop, piece in part:
                rows += (piece.data_ptr(), start, stop)
    past = past_caches and 0 < len(firsts) < 3
    (loops.add_up_past_caches if past else loops.add_up)(
        np.array(rows, np.int64),
        np.array(firsts, np.int64),
        np.array(counted, kind),
        out.data_ptr(),
        out.numel(),
    )


def encode_fp32(
    sources: Sequence[Source], weight: float, before: Tensor, data: Tensor, after: Tensor
) -> None:
    """See `kernels.py`."""
    assert data.numel() == 4 * after.numel()
    loops.encode_fp32(*_compiled(sources, weight, before, data, after))


def encode_bf16(
    sources: Sequence[Source], weight: float, before: Tensor, data: Tensor, after: Tensor
) -> None:
    """See `kernels.py`."""
    assert data.numel() == 2 * after.numel()
    loops.encode_bf16(*_compiled(sources, weight, before, data, after))


def decode_bf16(data: Tensor, out: Tensor, *, add: bool = False) -> None:
    """See `kernels.py`."""
    assert data.numel() == 2 * out.numel()
    loops.decode_bf16(data.data_ptr(), out.data_ptr(), out.numel(), add)


def reduce_bf16(
    parts: Sequence[Tensor | None],
    sources: Sequence[Source],
    weight: float,
    before: Tensor,
    data: Tensor,
    after: Tensor,
    out: Tensor,
) -> None:
    """See `kernels.py`."""
    assert data.numel() == 2 * after.numel()
    *said, numel = _compiled(sources, weight, before, data, after)
    loops.reduce_bf16(_places(parts, data, out, after), *said, out.data_ptr(), numel)


def encode_int8(
    sources: Sequence[Source],
    weight: float,
    before: Tensor,
    data: Tensor,
    after: Tensor,
    codes: int,
    block: int,
) -> None:
    """See `kernels.py`."""
    assert data.numel() == codes + after.numel()
    loops.encode_int8(*_compiled(sources, weight, before, data, after), codes, block)


def reduce_int8(
    parts: Sequence[Tensor | None],
    sources: Sequence[Source],
    weight: float,
    before: Tensor,
    data: Tensor,
    after: Tensor,
    out: Tensor,
    codes: int,
    block: int,
) -> None:
    """See `kernels.py`."""
    assert data.numel() == codes + after.numel()
    *said, numel = _compiled(sources, weight, before, data, after)
    places = _places(parts, data, out, after)
    loops.reduce_int8(places, *said, out.data_ptr(), numel, codes, block)


def decode_int8(data: Tensor, out: Tensor, codes: int, block: int, *, add: bool = False) -> None:
    """See `kernels.py`."""
    assert data.numel() == codes + out.numel()
    loops.decode_int8(data.data_ptr(), out.data_ptr(), out.numel(), codes, block, add)


def _compiled(
    sources: Sequence[Source], weight: float, before: Tensor, data: Tensor, after: Tensor
) -> tuple[Any, ...]:
    """Say the same to compiled code: addresses, and for each source its own, begin and end."""
    assert before.numel() == after.numel()
    assert cover(sources, after.numel(), torch.float32)
    rows: list[int] = []
    for start, stop, source in sources:
        rows += (0 if source is None else source.data_ptr(), start, stop)
    addresses = before.data_ptr(), data.data_ptr(), after.data_ptr()
    return np.array(rows, np.int64), float(weight), *addresses, after.numel()


def _places(
    parts: Sequence[Tensor | None], data: Tensor, out: Tensor, after: Tensor
) -> NDArray[np.int64]:
    assert out.numel() == after.numel()
    assert sum(part is None for part in parts) == 1
    assert all(part is None or part.numel() == data.numel() for part in parts)
    return np.array([0 if part is None else part.data_ptr() for part in parts], np.int64)
