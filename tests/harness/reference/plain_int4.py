"""The int4 codec in torch's operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.codecs.codec import MultiPassCodec, Source, first_code
from tests.harness.reference.plain import LARGE, TINY, weighed, write_residual

BLOCK = 128  # values that share a scale
LEVELS = 7  # the largest code
_CHUNK = 32_768  # values; whole blocks


class Int4(MultiPassCodec):
    """See `compiled_int4.Int4`."""

    def size(self, numel: int) -> int:
        """See `Codec`."""
        return first_code(numel, BLOCK) + (numel + 1) // 2

    def encode(
        self, sources: Sequence[Source], weight: float, before: Tensor, data: Tensor, after: Tensor
    ) -> None:
        """See `Codec`."""
        assert data.numel() == self.size(after.numel())
        for begin, values in weighed(sources, weight, before):
            error = after[begin : begin + len(values)]
            for part, scales, packed in _blocks(data, begin, len(values), after.numel()):
                rows = values[part].view(len(scales), -1)
                codes = _quantise(rows, scales)
                _pack(codes, packed)
                write_residual(error[part].view(rows.shape), rows, codes.float().mul_(scales))

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See `Codec`."""
        assert data.numel() == self.size(out.numel())
        for begin in range(0, out.numel(), _CHUNK):
            values = out[begin : begin + _CHUNK]
            for part, scales, packed in _blocks(data, begin, len(values), out.numel()):
                rows = values[part].view(len(scales), -1)
                codes = _unpack(packed, rows.shape[1])
                if add:
                    rows += codes * scales
                else:
                    torch.mul(codes, scales, out=rows)


def _blocks(
    data: Tensor, begin: int, numel: int, total: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield whole blocks, then a short one: values, scales (n, 1), packed codes (n, bytes)."""
    codes = first_code(total, BLOCK)
    scales = data[:codes].view(torch.float32)[begin // BLOCK :]
    packed = data[codes + begin // 2 :]
    blocks = numel // BLOCK
    whole = blocks * BLOCK
    if blocks:
        yield slice(whole), scales[:blocks, None], packed[: whole // 2].view(blocks, BLOCK // 2)
    if whole < numel:
        last = packed[whole // 2 : (numel + 1) // 2]
        yield slice(whole, numel), scales[blocks : blocks + 1, None], last.unsqueeze(0)


def _quantise(rows: Tensor, scales: Tensor) -> Tensor:
    """Write the scales of values, (n, length), one block a row; return their codes, int8."""
    largest = rows.abs().amax(1, keepdim=True)
    torch.div(largest, LEVELS, out=scales)
    scales.masked_fill_(largest < TINY, 0)
    lost = ~(largest < LARGE)
    scales.masked_fill_(lost, torch.nan)
    inverse = torch.div(LEVELS, largest).masked_fill_((largest < TINY) | lost, 0)
    return (rows * inverse).round_().masked_fill_(lost, 0).to(torch.int8)


def _pack(codes: Tensor, packed: Tensor) -> None:
    """Pack codes, (n, length), two a byte."""
    half = packed.shape[1]
    nibbles = codes & 15
    packed.copy_(nibbles[:, :half])
    packed[:, : codes.shape[1] - half] |= nibbles[:, half:].view(torch.uint8) << 4


def _unpack(packed: Tensor, length: int) -> Tensor:
    """Return the codes, (n, length) of int8."""
    both = torch.cat([packed & 15, packed >> 4], 1)[:, :length].to(torch.int8)
    return both.bitwise_xor_(8).sub_(8)
