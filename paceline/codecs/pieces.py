"""Values that lie apart, gradients of several parameters, as one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Piece = tuple[int, int, Tensor]  # begins and ends, in values; (end - begin,), contiguous
Source = tuple[int, int, Tensor | None]  # begins and ends, in values; None: they are zeros


def cover(sources: Sequence[Source], numel: int, dtype: torch.dtype) -> bool:
    """Tell whether flat tensors of a dtype fill their places, side by side from 0 to `numel`."""
    at = 0
    for start, stop, source in sources:
        if start != at or (source is not None and not _fills(source, stop - start, dtype)):
            return False
        at = stop
    return at == numel


def _fills(source: Tensor, numel: int, dtype: torch.dtype) -> bool:
    return source.numel() == numel and source.dtype is dtype and source.is_contiguous()


def cut(pieces: Iterable[Piece], values: slice) -> list[Piece]:
    """Cut pieces to some values; their places count from the first of these."""
    found = []
    for start, stop, piece in pieces:
        a, b = max(start, values.start), min(stop, values.stop)
        if a < b:
            inside = piece if (a, b) == (start, stop) else piece[a - start : b - start]
            found.append((a - values.start, b - values.start, inside))
    return found
