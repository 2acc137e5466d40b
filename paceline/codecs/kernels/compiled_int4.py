"""The int4 codec as numba compiles it: one pass over memory, without the lock."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from torch import Tensor

from paceline.codecs.codec import first_code
from paceline.codecs.kernels.compiled import (
    LARGE,
    TINY,
    CompiledCodec,
    Loops,
    floats,
    jit,
    largest_magnitude,
    pointer,
    weigh,
)

numba: Any = import_module("numba")  # its own types are for what it compiles, not for callers

BLOCK = 128  # values that share a scale
LEVELS = 7  # the largest code
_CHUNK = 2048  # values, 8 kB of float32; whole blocks


class Int4(CompiledCodec):
    """int4 codec: integers from -7 to 7, two a byte, and one scale per block of 128 values.

    A scale is the block's largest magnitude / 7, so an error is at most that magnitude / 14. For
    each encoded value v, residual + decoded equals v. A block that contains a NaN, an infinity, or
    a value of at least 2^127 is lost as a whole: its scale is a NaN. A block whose largest
    magnitude is below 2^-119 is encoded as zeros, because its scale would be denormal.

        data:  [ scales, float32 | padding to a cache-line boundary | codes ]
        codes: a block of n values has h = ceil(n / 2) bytes; byte i holds code i in its lower half
               and code h + i, or 0 behind the last one, in its upper half
    """

    def size(self, numel: int) -> int:
        """See `Codec`."""
        return first_code(numel, BLOCK) + (numel + 1) // 2

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See `Codec`."""
        numel = out.numel()
        at = data.data_ptr()
        assert data.numel() == self.size(numel)
        _decode_int4(at, at + first_code(numel, BLOCK), out.data_ptr(), numel, add)

    def _loops(self) -> Loops:
        return _encode_int4, _reduce_int4

    def _format(self, numel: int) -> tuple[int, ...]:
        return (first_code(numel, BLOCK),)


@jit
def _encode_int4(sources, weight, before, data, after, numel, codes):
    """Write a chunk of v to `after`, and encode its blocks there."""
    at = 0
    for begin in range(0, numel, _CHUNK):
        end = min(begin + _CHUNK, numel)
        at = weigh(sources, at, weight, before, after, begin, end)
        _quantise_chunk(after, data, codes, begin, end)


@jit
def _reduce_int4(parts, sources, weight, before, data, after, out, numel, codes):
    """Sum a chunk in `out`, encode its blocks, and write their decoded values there."""
    at = 0
    for begin in range(0, numel, _CHUNK):
        end = min(begin + _CHUNK, numel)
        n = end - begin
        scales = 4 * (begin // BLOCK)
        coded = codes + begin // 2
        for k in range(len(parts)):
            if parts[k] == 0:
                at = weigh(sources, at, weight, out if k > 0 else 0, out, begin, end)
            else:
                _decode_int4(parts[k] + scales, parts[k] + coded, out + 4 * begin, n, k > 0)
        total = floats(out, begin, n)
        old = floats(before, begin, n)
        new = floats(after, begin, n)
        for i in range(n):
            new[i] = total[i] + old[i]
        _quantise_chunk(after, data, codes, begin, end)
        _decode_int4(data + scales, data + coded, out + 4 * begin, n, False)


@jit
def _quantise_chunk(values, data, codes, begin, end):
    """Encode the blocks of a chunk, and write the residuals in the values' place."""
    for a in range(begin, end, BLOCK):
        scale = _quantise(values + 4 * a, data + codes + a // 2, min(BLOCK, end - a))
        floats(data, a // BLOCK, 1)[0] = scale


@jit
def _quantise(values_at, packed_at, n):
    """Encode a block's values, write the residual in their place, return the scale."""
    half = (n + 1) // 2
    lower = floats(values_at, 0, half)
    upper = floats(values_at, half, n - half)
    packed = numba.carray(pointer(packed_at), half, np.uint8)
    largest = largest_magnitude(values_at, n)
    if not largest < np.float32(LARGE):
        packed[:] = 0
        lower[:] = 0
        upper[:] = 0
        return np.float32(np.nan)
    scale = np.float32(0)
    inverse = np.float32(0)
    if largest >= np.float32(TINY):
        scale = largest / np.float32(LEVELS)
        inverse = np.float32(LEVELS) / largest
    for i in range(n - half):
        a = np.int32(np.rint(lower[i] * inverse))
        b = np.int32(np.rint(upper[i] * inverse))
        packed[i] = np.int32(np.int32(a & np.int32(15)) | np.int32(b << np.int32(4)))
        lower[i] -= np.float32(a) * scale
        upper[i] -= np.float32(b) * scale
    if n % 2:
        a = np.int32(np.rint(lower[half - 1] * inverse))
        packed[half - 1] = a & 15
        lower[half - 1] -= np.float32(a) * scale
    return scale


@jit
def _decode_int4(scales, packed_at, out, numel, add):
    for at in range(0, numel, BLOCK):
        n = min(BLOCK, numel - at)
        half = (n + 1) // 2
        scale = floats(scales, at // BLOCK, 1)[0]
        packed = numba.carray(pointer(packed_at + at // 2), half, np.uint8)
        lower = floats(out, at, half)
        upper = floats(out, at + half, n - half)
        if add:
            for i in range(half):
                lower[i] += _lower(packed[i]) * scale
            for i in range(n - half):
                upper[i] += _upper(packed[i]) * scale
        else:
            for i in range(half):
                lower[i] = _lower(packed[i]) * scale
            for i in range(n - half):
                upper[i] = _upper(packed[i]) * scale


@jit
def _lower(byte):
    """Return the code in a byte's lower half, as a float32."""
    return np.float32((np.int32(byte) & 15 ^ 8) - 8)


@jit
def _upper(byte):
    return np.float32((np.int32(byte) >> 4 ^ 8) - 8)
