"""Weighted sums of ranks' parts, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from paceline.sync.sources import Piece


def scale(values: Tensor, weight: float, out: Tensor) -> None:
    """Write `weight` times values; with weight 0, zeros whatever they are."""
    if weight:
        torch.mul(values, weight, out=out)
    else:
        out.zero_()


def add_up(parts: Sequence[Sequence[Piece]], weights: Sequence[float], out: Tensor) -> None:
    """Write the weighted sum of parts, added in their order; each covers `out` by its pieces."""
    places = sorted({place for part in parts for a, b, _ in part for place in (a, b)})
    at = [0] * len(parts)
    for start, stop in pairwise(places):
        values = []
        for number, part in enumerate(parts):
            while part[at[number]][1] <= start:
                at[number] += 1
            a, _, piece = part[at[number]]
            values.append(piece[start - a : stop - a])
        _add(values, weights, out[start:stop])


def _add(values: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    first = True
    for value, weight in zip(values, weights, strict=True):
        if not weight:
            continue
        if first:
            torch.mul(value, weight, out=out)
            first = False
        else:
            out.add_(value, alpha=weight)
    if first:
        out.zero_()
