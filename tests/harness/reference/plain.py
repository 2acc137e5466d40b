"""The weighted sum and the codecs of gradients in torch's operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.codecs.codec import MultiPassCodec, Piece, Source, cover, cut, first_code

BLOCK = 256  # values of int8 that share a scale
TINY, LARGE = 2.0**-119, 2.0**127  # beyond, a scale is denormal, and 127 of it may be infinite
_CHUNK = 32_768  # values; whole blocks of int8's
_NAN = 0x7FC0  # bfloat16's; torch's own differs between its scalar and its vector instructions


def add_up(
    parts: Sequence[Sequence[Piece]],
    weights: Sequence[float],
    out: Tensor,
    *,
    past_caches: bool = False,
) -> None:
    """See `WeightedSum`."""
    counted = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight]
    assert all(cover(part, out.numel(), out.dtype) for part, _ in counted)
    if not counted:
        out.zero_()
    product = torch.empty_like(out[:_CHUNK])
    for begin in range(0, out.numel(), _CHUNK):
        total = out[begin : begin + _CHUNK]
        for k, (part, weight) in enumerate(counted):
            term = product[: len(total)] if k else total
            for a, b, piece in cut(part, slice(begin, begin + len(total))):
                torch.mul(piece, weight, out=term[a:b])
            if k:
                total += term


class Bf16(MultiPassCodec):
    """See `compiled.Bf16`."""

    def size(self, numel: int) -> int:
        """See `Codec`."""
        return 2 * numel

    def encode(
        self, sources: Sequence[Source], weight: float, before: Tensor, data: Tensor, after: Tensor
    ) -> None:
        """See `Codec`."""
        codes = data.view(torch.bfloat16)
        for begin, values in weighed(sources, weight, before):
            coded = codes[begin : begin + len(values)]
            coded.copy_(values)
            coded.view(torch.int16).masked_fill_(values.isnan(), _NAN)
            write_residual(after[begin : begin + len(values)], values, coded.float())

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See `Codec`."""
        codes = data.view(torch.bfloat16)
        if not add:
            out.copy_(codes)
            return
        for begin in range(0, len(codes), _CHUNK):
            out[begin : begin + _CHUNK] += codes[begin : begin + _CHUNK].float()


class Int8(MultiPassCodec):
    """See `compiled.Int8`."""

    def size(self, numel: int) -> int:
        """See `Codec`."""
        return first_code(numel, BLOCK) + numel

    def encode(
        self, sources: Sequence[Source], weight: float, before: Tensor, data: Tensor, after: Tensor
    ) -> None:
        """See `Codec`."""
        codes = first_code(after.numel(), BLOCK)
        for begin, values in weighed(sources, weight, before):
            error = after[begin : begin + len(values)]
            for part, scales, coded in _blocks(data, begin, len(values), codes):
                rows = values[part].view(coded.shape)
                _quantise(rows, scales, coded)
                write_residual(error[part].view(coded.shape), rows, coded.float().mul_(scales))

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See `Codec`."""
        codes = first_code(out.numel(), BLOCK)
        for begin in range(0, out.numel(), _CHUNK):
            values = out[begin : begin + _CHUNK]
            for part, scales, coded in _blocks(data, begin, len(values), codes):
                rows = values[part].view(coded.shape)
                if add:
                    rows += coded * scales
                else:
                    torch.mul(coded, scales, out=rows)


def weighed(
    sources: Sequence[Source], weight: float, before: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield weight * source + before, chunk by chunk, each behind its first value's number."""
    assert cover(sources, before.numel(), torch.float32)
    scratch = torch.empty_like(before[:_CHUNK])
    for begin in range(0, before.numel(), _CHUNK):
        old = before[begin : begin + _CHUNK]
        values = scratch[: len(old)]
        end = begin + len(old)
        for start, stop, source in sources:
            a, b = max(begin, start), min(end, stop)
            if a >= b:
                continue
            here = slice(a - begin, b - begin)
            if source is None or not weight:
                values[here] = old[here]
            else:
                torch.mul(source[a - start : b - start], weight, out=values[here])
                values[here] += old[here]
        yield begin, values


def _blocks(
    data: Tensor, begin: int, numel: int, codes: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield whole blocks, then a short one: their values, scales (n, 1), and codes (n, length)."""
    scales = data[:codes].view(torch.float32)[begin // BLOCK :]
    coded = data[codes + begin : codes + begin + numel].view(torch.int8)
    whole = numel // BLOCK * BLOCK
    if whole:
        rows = whole // BLOCK
        yield slice(whole), scales[:rows].unsqueeze(1), coded[:whole].view(rows, BLOCK)
    if whole < numel:
        last = whole // BLOCK
        yield slice(whole, numel), scales[last : last + 1].unsqueeze(1), coded[whole:].unsqueeze(0)


def _quantise(rows: Tensor, scales: Tensor, codes: Tensor) -> None:
    """Encode values, (n, length), one block a row."""
    largest = rows.abs().amax(1, keepdim=True)
    torch.div(largest, 127, out=scales)
    scales.masked_fill_(largest < TINY, 0)
    lost = ~(largest < LARGE)
    scales.masked_fill_(lost, torch.nan)
    inverse = torch.div(127, largest).masked_fill_((largest < TINY) | lost, 0)
    codes.copy_((rows * inverse).round_().masked_fill_(lost, 0))


def write_residual(error: Tensor, values: Tensor, decoded: Tensor) -> None:
    """Write values - decoded to `error`, and 0 where that isn't finite."""
    torch.sub(values, decoded, out=error).nan_to_num_(0, 0, 0)
