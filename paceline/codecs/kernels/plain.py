"""The kernels in torch's operations, for where numba isn't installed: the same bits.

They go chunk by chunk, so that what one operation leaves is in a cache when the next one reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.codecs.pieces import Piece, Source, cover, cut

_CHUNK = 32_768  # values; whole blocks of int8's
TINY, LARGE = 2.0**-119, 2.0**127  # beyond, a scale is denormal, and 127 of it may be infinite
_NAN = 0x7FC0  # bfloat16's; torch's own differs between its scalar and its vector instructions


def add_up(
    parts: Sequence[Sequence[Piece]],
    weights: Sequence[float],
    out: Tensor,
    *,
    past_caches: bool = False,
) -> None:
    """See `kernels.py`."""
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


def encode_fp32(
    sources: Sequence[Source], weight: float, before: Tensor, data: Tensor, after: Tensor
) -> None:
    """See `kernels.py`."""
    out = data.view(torch.float32)
    for begin, values in _weighed(sources, weight, before):
        out[begin : begin + len(values)] = values
    after.zero_()


def encode_bf16(
    sources: Sequence[Source], weight: float, before: Tensor, data: Tensor, after: Tensor
) -> None:
    """See `kernels.py`."""
    codes = data.view(torch.bfloat16)
    for begin, values in _weighed(sources, weight, before):
        coded = codes[begin : begin + len(values)]
        coded.copy_(values)
        coded.view(torch.int16).masked_fill_(values.isnan(), _NAN)
        _keep(after[begin : begin + len(values)], values, coded.float())


def decode_bf16(data: Tensor, out: Tensor, *, add: bool = False) -> None:
    """See `kernels.py`."""
    codes = data.view(torch.bfloat16)
    if not add:
        out.copy_(codes)
        return
    for begin in range(0, len(codes), _CHUNK):
        out[begin : begin + _CHUNK] += codes[begin : begin + _CHUNK].float()


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
    _add_up_coded(parts, sources, weight, out, decode_bf16)
    encode_bf16([(0, len(out), out)], 1.0, before, data, after)
    decode_bf16(data, out)


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
    for begin, values in _weighed(sources, weight, before):
        error = after[begin : begin + len(values)]
        for part, scales, coded in _blocks(data, begin, len(values), codes, block):
            rows = values[part].view(coded.shape)
            _quantise(rows, scales, coded)
            _keep(error[part].view(coded.shape), rows, coded.float().mul_(scales))


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
    decode = partial(decode_int8, codes=codes, block=block)
    _add_up_coded(parts, sources, weight, out, decode)
    encode_int8([(0, len(out), out)], 1.0, before, data, after, codes, block)
    decode(data, out)


def decode_int8(data: Tensor, out: Tensor, codes: int, block: int, *, add: bool = False) -> None:
    """See `kernels.py`."""
    for begin in range(0, out.numel(), _CHUNK):
        values = out[begin : begin + _CHUNK]
        for part, scales, coded in _blocks(data, begin, len(values), codes, block):
            rows = values[part].view(coded.shape)
            if add:
                rows += coded * scales
            else:
                torch.mul(coded, scales, out=rows)


def _add_up_coded(
    parts: Sequence[Tensor | None],
    sources: Sequence[Source],
    weight: float,
    out: Tensor,
    decode: Callable[..., None],
) -> None:
    """Let out be the sum of what is decoded, and of weight * source in place of None."""
    for k, part in enumerate(parts):
        if part is None:
            _take(sources, weight, out, add=k > 0)
        else:
            decode(part, out, add=k > 0)


def _take(sources: Sequence[Source], weight: float, out: Tensor, *, add: bool) -> None:
    """Write or add weight * source."""
    assert cover(sources, out.numel(), torch.float32)
    for start, stop, source in sources:
        here = out[start:stop]
        if source is None or not weight:
            if not add:
                here.zero_()
        elif add:
            here += source * weight
        else:
            torch.mul(source, weight, out=here)


def _weighed(
    sources: Sequence[Source], weight: float, before: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield weight * source + before, chunk by chunk, each with where it begins."""
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
    data: Tensor, begin: int, numel: int, codes: int, block: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield whole blocks and then a short one: where they are, scales (n, 1), codes (n, length)."""
    scales = data[:codes].view(torch.float32)[begin // block :]
    coded = data[codes + begin : codes + begin + numel].view(torch.int8)
    whole = numel // block * block
    if whole:
        rows = whole // block
        yield slice(whole), scales[:rows].unsqueeze(1), coded[:whole].view(rows, block)
    if whole < numel:
        last = whole // block
        yield slice(whole, numel), scales[last : last + 1].unsqueeze(1), coded[whole:].unsqueeze(0)


def _quantise(rows: Tensor, scales: Tensor, codes: Tensor) -> None:
    """Code values, (n, length), a row a block."""
    largest = rows.abs().amax(1, keepdim=True)
    torch.div(largest, 127, out=scales)
    scales.masked_fill_(largest < TINY, 0)
    lost = ~(largest < LARGE)
    scales.masked_fill_(lost, torch.nan)
    inverse = torch.div(127, largest).masked_fill_((largest < TINY) | lost, 0)
    codes.copy_((rows * inverse).round_().masked_fill_(lost, 0))


def _keep(error: Tensor, values: Tensor, decoded: Tensor) -> None:
    """Let error be what the codes miss of the values, 0 where that isn't finite."""
    torch.sub(values, decoded, out=error).nan_to_num_(0, 0, 0)
