"""The `Codec` protocol: how gradients are encoded while they travel (`--wire`).

A codec is lossy. What it misses of a step's values, the residual, is added to the next step's
(error feedback; Seide et al. 2014, Karimireddy et al. 2019), so that the sums of the decoded values
follow the sums of the true values, and never differ from them by more than one step's error:

    v = weight * gradient + before      data = encode(v)      after = v - decode(data)

`before` and `after` are two memories, so that a step can be abandoned without a trace.

Values are given in pieces, flat tensors that lie apart: gradients of several parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Piece = tuple[int, int, Tensor]  # first value, behind the last one; (stop - start,), contiguous
Source = tuple[int, int, Tensor | None]  # a piece; None: its values are zeros
_ALIGN = 64  # bytes, a cache line
_WIDE_CHUNK = 2**15  # values, 128 KiB of float32: they stay in a core's cache


class Codec(Protocol):
    """Protocol of a lossy encoding of float32 values; all tensors are flat, contiguous, on the CPU.

    `out` and `after` are written and must not overlap the inputs, with one exception: `after` may
    be the same tensor as `before`. All implementations of one codec give the same bits, except for
    NaNs.
    """

    def size(self, numel: int) -> int:
        """Return the number of bytes of encoded values."""

    def encode(
        self, sources: Sequence[Source], weight: float, before: Tensor, data: Tensor, after: Tensor
    ) -> None:
        """Encode v = weight * source + before.

        A NaN or an infinity is decoded as a value that isn't finite, so that the loss shows it. Its
        residual is 0, so that it spoils no later step.

        Args:
            sources: cover the n values in order.
            weight: with 0 all sources count as zeros, whatever they hold.
            before: (n,), the residual of the last step.
            data: (size(n),) of uint8; bytes that only align others are left as they are.
            after: (n,), the residual of this step, v less its decoded value.
        """

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Write the values to `out`, (n,), or add them to it."""

    def reduce(
        self,
        parts: Sequence[Tensor | None],
        sources: Sequence[Source],
        weight: float,
        before: Tensor,
        data: Tensor,
        after: Tensor,
        out: Tensor,
    ) -> None:
        """Sum contributions, encode the sum, and write its decoded value to `out`.

        Args:
            parts: (size(n),) each, encoded contributions in the order of the sum; None, once,
                stands for weight * source.
            sources: as in `encode`.
            weight: as in `encode`.
            before: (n,), the residual of the last step's sum.
            data: as in `encode`.
            after: as in `encode`.
            out: (n,).
        """


class MultiPassCodec:
    """Base class of codecs that implement `reduce` as separate passes of `encode` and `decode`."""

    def reduce(
        self: Codec,
        parts: Sequence[Tensor | None],
        sources: Sequence[Source],
        weight: float,
        before: Tensor,
        data: Tensor,
        after: Tensor,
        out: Tensor,
    ) -> None:
        """See `Codec`."""
        sum_contributions(self, parts, sources, weight, out)
        encode_sum(self, before, data, after, out)


def sum_contributions(
    codec: Codec,
    parts: Sequence[Tensor | None],
    sources: Sequence[Source],
    weight: float,
    out: Tensor,
) -> None:
    """Write the sum of contributions to `out`; the arguments are those of `Codec.reduce`."""
    for number, part in enumerate(parts):
        if part is None:
            _weigh(sources, weight, out, add=number > 0)
        else:
            codec.decode(part, out, add=number > 0)


def encode_sum(codec: Codec, before: Tensor, data: Tensor, after: Tensor, out: Tensor) -> None:
    """Encode the sum in `out`, and write its decoded value there; as in `Codec.reduce`."""
    codec.encode([(0, len(out), out)], 1.0, before, data, after)
    codec.decode(data, out)


def _weigh(sources: Sequence[Source], weight: float, out: Tensor, *, add: bool) -> None:
    """Write or add weight * source."""
    assert cover(sources, out.numel(), torch.float32)
    for start, stop, source in sources:
        target = out[start:stop]
        if source is None or not weight:
            if not add:
                target.zero_()
        elif add:
            target += source * weight
        else:
            torch.mul(source, weight, out=target)


def cover(sources: Sequence[Source], numel: int, dtype: torch.dtype) -> bool:
    """Return whether pieces of a dtype cover the values from 0 to `numel`, in order."""
    at = 0
    for start, stop, source in sources:
        if start != at or (source is not None and not _fills(source, stop - start, dtype)):
            return False
        at = stop
    return at == numel


def _fills(source: Tensor, numel: int, dtype: torch.dtype) -> bool:
    return source.numel() == numel and source.dtype is dtype and source.is_contiguous()


def first_code(numel: int, block: int) -> int:
    """Return the byte behind one float32 scale a block of values, on a cache line."""
    return -(-4 * -(-numel // block) // _ALIGN) * _ALIGN


def add_up_wide(parts: Sequence[Sequence[Piece]], weights: Sequence[float], out: Tensor) -> Tensor:
    """Write ((w0 * p0 + w1 * p1) + …) of values of any floating dtype to `out`, in float32.

    Args:
        parts: contributions; the pieces of each cover the values, and overlap nowhere.
        weights: one a contribution; with 0 it is left out, whatever it holds.
        out: (values,) of float32.

    Returns:
        `out`.
    """
    product = torch.empty(min(len(out), _WIDE_CHUNK))
    out.zero_()
    for part, weight in zip(parts, weights, strict=True):
        for start, stop, piece in part if weight else ():
            for first in range(start, stop, _WIDE_CHUNK):
                values = piece[first - start : first - start + _WIDE_CHUNK]
                out[first : first + len(values)] += (
                    product[: len(values)].copy_(values).mul_(weight)
                )
    return out


def cut(pieces: Iterable[Piece], values: slice) -> list[Piece]:
    """Cut pieces to a range of values, and count from the first of these."""
    found = []
    for start, stop, piece in pieces:
        a = max(start, values.start)
        b = min(stop, values.stop)
        if a < b:
            inside = piece if (a, b) == (start, stop) else piece[a - start : b - start]
            found.append((a - values.start, b - values.start, inside))
    return found
