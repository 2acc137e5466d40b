"""The codecs and the weighted sum as numba compiles them: one pass over memory, without the lock.

Compiled code is given addresses: to make an array of a tensor, and to find out what kind of array
it is, would take longer than the work on a small piece. A piece is done chunk by chunk, so that
later loops over a chunk read it from the core's nearest cache. Nothing is contracted: a product is
rounded before it is added, so that the bits are those of torch's operations, in the same order, on
any processor (`tests/harness/reference/`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.codecs.codec import Piece, Source, cover, first_code
from paceline.codecs.kernels.nontemporal import LINE, add_past_caches, fence, weigh_past_caches
from paceline.comm.numba_compiler import compiler

numba: Any = import_module("numba")  # its own types are for what it compiles, not for callers
cgutils: Any = import_module("numba.core.cgutils")
intrinsic: Any = import_module("numba.extending").intrinsic

BLOCK = 256  # values of int8 that share a scale
# Beyond these magnitudes a block has no usable scale. Below, it would be denormal, which some
# processors are set to flush to 0; above, 127 times the scale may be infinite.
TINY = 2.0**-119
LARGE = 2.0**127
_CHUNK = 2048  # values, 8 kB of float32; whole blocks of int8's
_KINDS = {torch.float32: np.float32, torch.float64: np.float64}

Loops = tuple[Callable[..., None], Callable[..., None]]  # a codec's: to encode, to reduce

jit = compiler(error_model="numpy")


def add_up(
    parts: Sequence[Sequence[Piece]],
    weights: Sequence[float],
    out: Tensor,
    *,
    past_caches: bool = False,
) -> None:
    """Write ((w0 * p0 + w1 * p1) + w2 * p2) + … to `out`, each step rounded.

    Args:
        parts: contributions of out's floating dtype; the pieces of each cover `out`, and overlap it
            nowhere.
        weights: one a contribution; with 0 it is left out, whatever it holds.
        out: flat and contiguous.
        past_caches: another core, or a much later step, reads the sum, so it bypasses this core's
            caches.
    """
    kind = _KINDS.get(out.dtype)
    if kind is None:  # 16 bits, which numba has no type for on processors
        _add_up_by_torch(parts, weights, out)
        return
    rows: list[int] = []
    firsts: list[int] = []
    counted: list[float] = []
    for part, weight in zip(parts, weights, strict=True):
        # Not even read where the weight is 0, for 0 times a NaN or an infinity would be a NaN.
        if weight:
            assert cover(part, out.numel(), out.dtype)
            firsts.append(len(rows))
            counted.append(weight)
            for start, stop, piece in part:
                rows += (piece.data_ptr(), start, stop)
    # More contributions are summed in several passes over `out`, which then belongs in the cache.
    past = past_caches and 0 < len(firsts) < 3
    (_add_up_past_caches if past else _add_up)(
        np.array(rows, np.int64),
        np.array(firsts, np.int64),
        np.array(counted, kind),
        out.data_ptr(),
        out.numel(),
    )


def _add_up_by_torch(
    parts: Sequence[Sequence[Piece]], weights: Sequence[float], out: Tensor
) -> None:
    """Sum in the same order by torch's operations."""
    counted = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight]
    if not counted:
        out.zero_()
    for number, (part, weight) in enumerate(counted):
        assert cover(part, out.numel(), out.dtype)
        for start, stop, piece in part:
            # The first part overwrites, and nothing is zeroed before: it may be `out` itself.
            if number == 0:
                torch.mul(piece, weight, out=out[start:stop])
            else:
                out[start:stop] += piece * weight


class CompiledCodec(ABC):
    """Base class of codecs whose loops numba compiles: they are given addresses, and numbers."""

    @abstractmethod
    def size(self, numel: int) -> int:
        """See `Codec`."""

    def encode(
        self, sources: Sequence[Source], weight: float, before: Tensor, data: Tensor, after: Tensor
    ) -> None:
        """See `Codec`."""
        numel = after.numel()
        assert data.numel() == self.size(numel)
        where = addresses(sources, weight, before, data, after)
        self._loops()[0](*where, numel, *self._format(numel))

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
        """See `Codec`."""
        numel = out.numel()
        assert data.numel() == self.size(numel)
        others = contributions(parts, data, out, after)
        where = addresses(sources, weight, before, data, after)
        self._loops()[1](others, *where, out.data_ptr(), numel, *self._format(numel))

    @abstractmethod
    def _loops(self) -> Loops:
        """Return the compiled loops of `encode` and `reduce`."""

    def _format(self, numel: int) -> tuple[int, ...]:
        """Return what the loops are given behind the number of values."""
        return ()


class Bf16(CompiledCodec):
    """bfloat16 codec: a float32's upper half, rounded to nearest even, 8 bits of precision.

    A residual needs at most 16 bits, so for an encoded value v, residual + decoded equals v
    exactly. A value that rounds to infinity is lost. A NaN becomes 0x7fc0.
    """

    def size(self, numel: int) -> int:
        """See `Codec`."""
        return 2 * numel

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See `Codec`."""
        assert data.numel() == self.size(out.numel())
        _decode_bf16(data.data_ptr(), out.data_ptr(), out.numel(), add)

    def _loops(self) -> Loops:
        return _encode_bf16, _reduce_bf16


class Int8(CompiledCodec):
    """int8 codec: integers from -127 to 127 and one scale per block of 256 values.

    A scale is the block's largest magnitude / 127, so an error is at most that magnitude / 254.
    For each encoded value v, residual + decoded equals v exactly. A block that contains a NaN, an
    infinity, or a value of at least 2^127 is lost as a whole: its scale is a NaN. A block whose
    largest magnitude is below 2^-119 is encoded as zeros, because its scale would be denormal.

        data: [ scales, float32 | padding to a cache-line boundary | codes, int8 ]
    """

    def size(self, numel: int) -> int:
        """See `Codec`."""
        return first_code(numel, BLOCK) + numel

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See `Codec`."""
        numel = out.numel()
        at = data.data_ptr()
        codes = first_code(numel, BLOCK)
        assert data.numel() == codes + numel
        _decode_int8(at, at + codes, out.data_ptr(), numel, BLOCK, add)

    def _loops(self) -> Loops:
        return _encode_int8, _reduce_int8

    def _format(self, numel: int) -> tuple[int, ...]:
        return first_code(numel, BLOCK), BLOCK


def addresses(
    sources: Sequence[Source], weight: float, before: Tensor, data: Tensor, after: Tensor
) -> tuple[Any, ...]:
    """Return what compiled code is given: each source's address, start and stop, and the rest."""
    assert before.numel() == after.numel()
    assert cover(sources, after.numel(), torch.float32)
    rows: list[int] = []
    for start, stop, source in sources:
        rows += (0 if source is None else source.data_ptr(), start, stop)
    where = before.data_ptr(), data.data_ptr(), after.data_ptr()
    return np.array(rows, np.int64), float(weight), *where


def contributions(
    parts: Sequence[Tensor | None], data: Tensor, out: Tensor, after: Tensor
) -> NDArray[np.int64]:
    """Return the addresses of encoded contributions, 0 for the one that is given by sources."""
    assert out.numel() == after.numel()
    assert sum(part is None for part in parts) == 1
    assert all(part is None or part.numel() == data.numel() for part in parts)
    return np.array([0 if part is None else part.data_ptr() for part in parts], np.int64)


@intrinsic
def pointer(context, address):
    """Make a pointer of an address."""

    def generate(_, builder, __, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return numba.types.voidptr(address), generate


@jit
def floats(address, at, numel):
    """Make an array of `numel` float32 values, from value `at` behind an address."""
    return numba.carray(pointer(address + 4 * at), numel, np.float32)


@jit
def _add_up_past_caches(rows, at, weights, out, numel):
    """Sum one contribution or two, which this core reads for the last time in a while."""
    size = weights.itemsize
    lanes = LINE // weights.itemsize
    begin = 0
    while begin < numel:
        end = numel
        for k in range(len(at)):
            end = min(end, rows[at[k] + 2])
        a = rows[at[0]] + size * (begin - rows[at[0] + 1])
        b = rows[at[-1]] + size * (begin - rows[at[-1] + 1])
        before = min(end, begin + (-(out + size * begin) % LINE) // size)
        _add(rows, at, weights, out, begin, before)
        lines = (end - before) // lanes
        a += size * (before - begin)
        b += size * (before - begin)
        to = out + size * before
        if len(at) == 1:
            for line in range(lines):
                weigh_past_caches(to + LINE * line, a + LINE * line, weights[0])
        else:
            for line in range(lines):
                there = LINE * line
                add_past_caches(to + there, a + there, weights[0], b + there, weights[1])
        _add(rows, at, weights, out, before + lines * lanes, end)
        for k in range(len(at)):
            if rows[at[k] + 2] == end:
                at[k] += 3
        begin = end
    fence()


@jit
def _add_up(rows, at, weights, out, numel):
    """Sum chunk by chunk, and up to each piece's end; `at` has the next piece of each part."""
    begin = 0
    while begin < numel:
        end = min(begin + _CHUNK, numel)
        for k in range(len(at)):
            end = min(end, rows[at[k] + 2])
        _add(rows, at, weights, out, begin, end)
        for k in range(len(at)):
            if rows[at[k] + 2] == end:
                at[k] += 3
        begin = end


@jit
def _add(rows, at, weights, out, begin, end):
    """Sum the first part, or the first two, then two at a time: one pass over out for each."""
    n = end - begin
    kind = weights.dtype
    total = numba.carray(pointer(out + weights.itemsize * begin), n, kind)
    single = len(at) % 2
    if len(at) == 0:
        total[:] = 0
    elif single:
        a = _piece(rows, at[0], begin, n, weights)
        wa = weights[0]
        for i in range(n):
            total[i] = wa * a[i]
    for k in range(single, len(at), 2):
        a = _piece(rows, at[k], begin, n, weights)
        wa = weights[k]
        b = _piece(rows, at[k + 1], begin, n, weights)
        wb = weights[k + 1]
        if k == 0:
            for i in range(n):
                total[i] = wa * a[i] + wb * b[i]
        else:
            for i in range(n):
                total[i] = (total[i] + wa * a[i]) + wb * b[i]


@jit
def _piece(rows, row, begin, n, weights):
    where = rows[row] + weights.itemsize * (begin - rows[row + 1])
    return numba.carray(pointer(where), n, weights.dtype)


@jit
def weigh(sources, at, weight, before, out, begin, end):
    """Write weight * source + before to out[begin:end]; return the number of the next source.

    `before` may be `out`, or 0: then there is nothing to add.
    """
    weight = np.float32(weight)
    while begin < end:
        source = sources[3 * at]
        first = sources[3 * at + 1]
        last = sources[3 * at + 2]
        stop = min(end, last)
        n = stop - begin
        old = floats(before, begin, n)
        new = floats(out, begin, n)
        if source != 0 and weight != 0:
            values = floats(source, begin - first, n)
            if before == 0:
                for i in range(n):
                    new[i] = weight * values[i]
            elif before == out:  # what LLVM can't know, and wouldn't vectorise
                for i in range(n):
                    new[i] = weight * values[i] + new[i]
            else:
                for i in range(n):
                    new[i] = weight * values[i] + old[i]
        elif before == 0:
            new[:] = 0
        elif before != out:
            new[:] = old
        begin = stop
        if stop == last:
            at += 1
    return at


@jit
def _encode_bf16(sources, weight, before, data, after, numel):
    """Write a chunk of v to `after`, and encode it there."""
    at = 0
    for begin in range(0, numel, _CHUNK):
        end = min(begin + _CHUNK, numel)
        at = weigh(sources, at, weight, before, after, begin, end)
        n = end - begin
        values = floats(after, begin, n)
        codes = numba.carray(pointer(data + 2 * begin), n, np.uint16)
        for i in range(n):
            code = _rounded(values[i])
            codes[i] = code
            error = values[i] - _widened(code)
            values[i] = error if abs(error) < np.inf else np.float32(0)


@jit
def _reduce_bf16(parts, sources, weight, before, data, after, out, numel):
    """Sum a chunk in `out`, encode it, and write its decoded value there."""
    at = 0
    for begin in range(0, numel, _CHUNK):
        end = min(begin + _CHUNK, numel)
        for k in range(len(parts)):
            if parts[k] == 0:
                at = weigh(sources, at, weight, out if k > 0 else 0, out, begin, end)
            else:
                _decode_bf16(parts[k] + 2 * begin, out + 4 * begin, end - begin, k > 0)
        n = end - begin
        values = floats(out, begin, n)
        old = floats(before, begin, n)
        new = floats(after, begin, n)
        codes = numba.carray(pointer(data + 2 * begin), n, np.uint16)
        for i in range(n):
            value = values[i] + old[i]
            code = _rounded(value)
            codes[i] = code
            values[i] = _widened(code)
            error = value - values[i]
            new[i] = error if abs(error) < np.inf else np.float32(0)


@jit
def _rounded(value):
    """Return a float32's nearest bfloat16; numba would make 64 bits of each result of 32."""
    bits = np.float32(value).view(np.uint32)
    even = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    up = np.uint32(bits + np.uint32(np.uint32(0x7FFF) + even))
    nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(0x7FC0) if nan else np.uint16(up >> np.uint32(16))


@jit
def _widened(code):
    return np.uint32(np.uint32(code) << np.uint32(16)).view(np.float32)


@jit
def _decode_bf16(data, out, numel, add):
    """Write or add the decoded values."""
    codes = numba.carray(pointer(data), numel, np.uint16)
    values = floats(out, 0, numel)
    if add:
        for i in range(numel):
            values[i] += _widened(codes[i])
    else:
        for i in range(numel):
            values[i] = _widened(codes[i])


@jit
def _encode_int8(sources, weight, before, data, after, numel, codes, block):
    """Write a chunk of v to `after`, and encode its blocks there."""
    at = 0
    for begin in range(0, numel, _CHUNK):
        end = min(begin + _CHUNK, numel)
        at = weigh(sources, at, weight, before, after, begin, end)
        for a in range(begin, end, block):
            n = min(block, end - a)
            scale = _quantise(after + 4 * a, data + codes + a, n)
            floats(data, a // block, 1)[0] = scale


@jit
def _reduce_int8(parts, sources, weight, before, data, after, out, numel, codes, block):
    """Sum a chunk in `out`, encode its blocks, and write their decoded values there."""
    at = 0
    for begin in range(0, numel, _CHUNK):
        end = min(begin + _CHUNK, numel)
        n = end - begin
        blocks = begin // block
        for k in range(len(parts)):
            if parts[k] == 0:
                at = weigh(sources, at, weight, out if k > 0 else 0, out, begin, end)
            else:
                scales = parts[k] + 4 * blocks
                coded = parts[k] + codes + begin
                _decode_int8(scales, coded, out + 4 * begin, n, block, k > 0)
        total = floats(out, begin, n)
        old = floats(before, begin, n)
        new = floats(after, begin, n)
        for i in range(n):
            new[i] = total[i] + old[i]
        for a in range(begin, end, block):
            scale = _quantise(after + 4 * a, data + codes + a, min(block, end - a))
            floats(data, a // block, 1)[0] = scale
        _decode_int8(data + 4 * blocks, data + codes + begin, out + 4 * begin, n, block, False)


@jit
def _quantise(values_at, codes_at, n):
    """Encode a block's values, write the residual in their place, return the scale."""
    values = floats(values_at, 0, n)
    codes = numba.carray(pointer(codes_at), n, np.int8)
    largest = largest_magnitude(values_at, n)
    # The negation is true for a NaN, too, as no comparison with one is.
    if not largest < np.float32(LARGE):
        codes[:] = 0
        values[:] = 0
        return np.float32(np.nan)
    scale = np.float32(0)
    inverse = np.float32(0)
    if largest >= np.float32(TINY):
        scale = largest / np.float32(127)
        # From the magnitude, not the scale: 1 / scale would round twice.
        inverse = np.float32(127) / largest
    for i in range(n):
        code = np.int32(np.rint(values[i] * inverse))
        codes[i] = code
        values[i] -= np.float32(code) * scale
    return scale


@jit
def largest_magnitude(values_at, n):
    """Return the largest magnitude: as numbers, bits of a NaN are larger than any value's."""
    bits = numba.carray(pointer(values_at), n, np.int32)
    largest = np.int32(0)
    for i in range(n):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    return np.int32(largest).view(np.float32)


@jit
def _decode_int8(scales, codes, out, numel, block, add):
    for at in range(0, numel, block):
        n = min(block, numel - at)
        scale = floats(scales, at // block, 1)[0]
        coded = numba.carray(pointer(codes + at), n, np.int8)
        values = floats(out, at, n)
        if add:
            for i in range(n):
                values[i] += np.float32(coded[i]) * scale
        else:
            for i in range(n):
                values[i] = np.float32(coded[i]) * scale
