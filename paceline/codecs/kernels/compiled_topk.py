"""The topk codec as numba compiles it: one pass over memory, without the lock.

    data:    [ base and step of each chunk, float32 | chunk 0 | chunk 1 | … ]
    chunk:   [ indices, 12 bits each, two in three bytes | codes, 2 or 4 bits each ]

Indices ascend. Where fewer values are kept than there is room for, zeros follow: an index that
isn't larger than the one before it ends the chunk. All bits are filled from a byte's lowest.

A chunk's kept values are found by a threshold: the bits of the least magnitude that is kept. As
numbers, bits are in the order of the magnitudes. So a binary search finds the threshold. Its steps
count the values of a chunk, in the core's nearest cache; later ones only the candidates.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from typing import Any

import numpy as np
from torch import Tensor

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

CHUNK = 4096  # values; an index in it has 12 bits
STEPS = 7  # from the least code of 4 bits to the largest
# What a chunk's largest magnitude becomes where magnitudes are added up. As integers, because their
# sum is the same in any order; so large, because 4,096 of them, or one times 4,096, fit 64 bits.
UNIT = 2.0**30
_OCTAVE = 1 << 23  # from a magnitude's bits to those of its double
_ENOUGH = 4  # times what is kept, candidates among which the search continues


@dataclass(frozen=True, kw_only=True)
class TopK(CompiledCodec):
    """topk codec: the largest values of each chunk of 4,096, by magnitude (SparseLoCo).

    Of n values, ceil(fraction * n) are kept; of equal magnitudes, the first. The others are decoded
    as zeros. The residual is what is left of each value, to a float32's rounding. A chunk that
    contains a NaN, an infinity, or a value of at least 2^127 is lost as a whole and decoded as
    NaNs. Of a chunk whose largest magnitude is below 2^-119 nothing is kept.

    A kept value is decoded as sign * (base + code * step). With 2 bits, the codes 0 and 1 stand for
    the mean of the magnitudes below their mean, and the mean of the others: means of bins are how
    SparseLoCo's implementation decodes its 2 bits. With 4 bits, the codes 0 to 7 divide the range
    of the kept magnitudes evenly.

    Attributes:
        fraction: of the values of a chunk, above 0 and at most 1/2.
        bits: of a kept value, with its sign: 2 or 4.

    References:
        Sarfi et al. 2025, "Communication Efficient LLM Pre-training with SparseLoCo",
        arXiv 2508.15706.
    """

    fraction: Fraction
    bits: int = 2

    def kept(self, numel: int) -> int:
        """Return how many of the values of a chunk are kept at most."""
        return -(-numel * self.fraction.numerator // self.fraction.denominator)

    def chunk_size(self, numel: int) -> int:
        """Return the bytes of the indices and codes of a chunk of so many values."""
        kept = self.kept(numel)
        return (3 * kept + 1) // 2 + (self.bits * kept + 7) // 8

    def size(self, numel: int) -> int:
        """See `Codec`."""
        whole, last = divmod(numel, CHUNK)
        levels = 8 * (whole + (last > 0))
        return levels + whole * self.chunk_size(CHUNK) + self.chunk_size(last)

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See `Codec`."""
        assert data.numel() == self.size(out.numel())
        chunks = -(-out.numel() // CHUNK)
        at = data.data_ptr()
        _decode_topk(
            at, at + 8 * chunks, out.data_ptr(), out.numel(), *self._format(out.numel()), add
        )

    def _loops(self) -> Loops:
        return _encode_topk, _reduce_topk

    def _format(self, numel: int) -> tuple[int, int, int]:
        """Return how many values are kept of a whole chunk and of the last one, and the bits."""
        return self.kept(CHUNK), self.kept(numel % CHUNK or CHUNK), self.bits


@jit
def _size(kept, bits):
    """Return the bytes of a chunk's indices, and of all that is packed of it."""
    indices = (3 * kept + 1) // 2
    return indices, indices + (bits * kept + 7) // 8


@jit
def _encode_topk(sources, weight, before, data, after, numel, kept, kept_last, bits):
    """Write a chunk of v to `after`, and encode it there."""
    at = 0
    chunks = (numel + CHUNK - 1) // CHUNK
    packed = data + 8 * chunks
    size = _size(kept, bits)[1]
    scratch = _scratch(kept)
    for number in range(chunks):
        begin = number * CHUNK
        end = min(number * CHUNK + CHUNK, numel)
        at = weigh(sources, at, weight, before, after, begin, end)
        room = kept if number < chunks - 1 else kept_last
        where = after + 4 * begin, data + 8 * number, packed + size * number
        _encode_chunk(where, end - begin, room, bits, scratch)


@jit
def _reduce_topk(parts, sources, weight, before, data, after, out, numel, kept, kept_last, bits):
    """Sum a chunk in `out`, encode it, and write its decoded values there."""
    at = 0
    chunks = (numel + CHUNK - 1) // CHUNK
    first = 8 * chunks
    size = _size(kept, bits)[1]
    scratch = _scratch(kept)
    for number in range(chunks):
        begin = number * CHUNK
        end = min(number * CHUNK + CHUNK, numel)
        n = end - begin
        room = kept if number < chunks - 1 else kept_last
        levels = 8 * number
        packed = first + size * number
        for k in range(len(parts)):
            if parts[k] == 0:
                at = weigh(sources, at, weight, out if k > 0 else 0, out, begin, end)
            else:
                where = parts[k] + levels, parts[k] + packed, out + 4 * begin
                _decode_chunk(where, n, room, bits, k > 0)
        total = floats(out, begin, n)
        old = floats(before, begin, n)
        new = floats(after, begin, n)
        for i in range(n):
            new[i] = total[i] + old[i]
        where = after + 4 * begin, data + levels, data + packed
        _encode_chunk(where, n, room, bits, scratch)
        _decode_chunk((data + levels, data + packed, out + 4 * begin), n, room, bits, False)


@jit
def _scratch(kept):
    """Make room for candidates' indices and magnitudes, and for codes."""
    return np.empty(CHUNK + 1, np.int32), np.empty(CHUNK + 1, np.int32), np.empty(kept, np.uint8)


@jit
def _encode_chunk(where, n, kept, bits, scratch):
    """Encode a chunk's values, and write the residuals in their place."""
    values_at, levels_at, packed_at = where
    chosen, magnitudes, codes = scratch
    behind, size = _size(kept, bits)
    values = floats(values_at, 0, n)
    levels = floats(levels_at, 0, 2)
    packed = numba.carray(pointer(packed_at), size, np.uint8)
    packed[:] = 0
    levels[:] = 0
    largest = largest_magnitude(values_at, n)
    if not largest < np.float32(LARGE):
        levels[0] = np.nan
        values[:] = 0
        return
    if largest < np.float32(TINY):
        return
    count = _choose(values_at, n, kept, largest, chosen, magnitudes)
    if bits == 2:
        base, step = _two_means(values, chosen, count, largest, codes)
    else:
        base, step = _even_levels(values, chosen, count, largest, codes)
    levels[0] = base
    levels[1] = step
    for j in range(count):
        value = values[chosen[j]]
        magnitude = base + np.float32(codes[j]) * step
        values[chosen[j]] = value + (magnitude if value < 0 else -magnitude)
        if value < 0:
            codes[j] |= 1 << (bits - 1)
    _pack(chosen, codes, count, packed, behind, bits)


@jit
def _choose(values_at, n, kept, largest, chosen, magnitudes):
    """Write the indices of the largest magnitudes, ascending; return how many; no zeros."""
    bits = numba.carray(pointer(values_at), n, np.int32)
    low, high = _bounds(bits, n, kept, largest)
    candidates = 0
    for i in range(n):
        magnitude = bits[i] & 0x7FFFFFFF
        chosen[candidates] = i
        magnitudes[candidates] = magnitude
        candidates += magnitude >= low
    least = _least_kept(magnitudes, candidates, kept, low, high)
    ties = kept - _count(magnitudes, candidates, least + 1)  # of these, the first are kept
    count = 0
    for j in range(candidates):
        chosen[count] = chosen[j]
        tie = magnitudes[j] == least
        count += (magnitudes[j] > least) | (tie & (ties > 0))
        ties -= tie
    return count


@jit
def _bounds(bits, n, kept, largest):
    """Bound the least magnitude that is kept, as bits: at least `low`, less than `high`.

    Where zeros would be kept, `low` is 1. A few times as many values as are kept are at least
    `low`, or it is the least that is kept.
    """
    top = _bits_of(largest) + 1
    reach = _OCTAVE
    count = 0
    low = high = top
    while count < kept and low > 1:
        high = low
        low = max(top - reach, 1)
        count = _count(bits, n, low)
        reach *= 2
    while count > _ENOUGH * kept and high - low > 1:
        middle = (low + high) // 2
        found = _count(bits, n, middle)
        if found >= kept:
            low = middle
            count = found
        else:
            high = middle
    return low, high


@jit
def _least_kept(bits, n, kept, low, high):
    """Return the least magnitude that is kept, as bits, given its bounds."""
    while n > kept and high - low > 1:
        middle = (low + high) // 2
        count = _count(bits, n, middle)
        if count == kept:
            return middle
        if count > kept:
            low = middle
        else:
            high = middle
    return low


@jit
def _bits_of(magnitude):
    return np.int64(np.float32(magnitude).view(np.int32))


@jit
def _count(bits, n, least):
    """Count the magnitudes that are at least so large."""
    least = np.int32(least)
    count = np.int32(0)
    for i in range(n):  # of 32 bits all through, or half as many would go into a vector
        count = np.int32(count + np.int32((bits[i] & np.int32(0x7FFFFFFF)) >= least))
    return count


@jit
def _two_means(values, chosen, count, largest, codes):
    """Write codes, 1 from the mean magnitude on; return base and step."""
    factor = UNIT / np.float64(largest)
    total = np.int64(0)
    for j in range(count):
        total += np.int64(np.float64(abs(values[chosen[j]])) * factor)
    above = np.int64(0)
    sum_above = np.int64(0)
    for j in range(count):
        whole = np.int64(np.float64(abs(values[chosen[j]])) * factor)
        upper = whole * count >= total
        codes[j] = upper
        if upper:
            above += 1
            sum_above += whole
    unit = np.float64(largest) * (1 / UNIT)
    high = np.float32(np.float64(sum_above) / np.float64(above) * unit)
    below = count - above
    if below == 0:
        return high, np.float32(0)
    low = np.float32(np.float64(total - sum_above) / np.float64(below) * unit)
    return low, high - low


@jit
def _even_levels(values, chosen, count, largest, codes):
    """Write codes, 0 for the least magnitude and `STEPS` for the largest; return base and step."""
    least = largest
    for j in range(count):
        least = min(least, abs(values[chosen[j]]))
    span = largest - least
    step = np.float32(0)
    inverse = np.float32(0)
    if span >= np.float32(TINY):
        step = span / np.float32(STEPS)
        inverse = np.float32(STEPS) / span
    for j in range(count):
        codes[j] = np.int32(np.rint((abs(values[chosen[j]]) - least) * inverse))
    return least, step


@jit
def _pack(chosen, codes, count, packed, behind, bits):
    """Write indices and codes into zeros."""
    for j in range(count):
        at = 3 * (j // 2)
        index = chosen[j]
        if j % 2:
            packed[at + 1] |= (index & 15) << 4
            packed[at + 2] = index >> 4
        else:
            packed[at] = index & 255
            packed[at + 1] = index >> 8
    each = 8 // bits
    for j in range(count):
        packed[behind + j // each] |= codes[j] << (bits * (j % each))


@jit
def _decode_topk(levels, packed, out, numel, kept, kept_last, bits, add):
    chunks = (numel + CHUNK - 1) // CHUNK
    size = _size(kept, bits)[1]
    for number in range(chunks):
        begin = number * CHUNK
        end = min(number * CHUNK + CHUNK, numel)
        room = kept if number < chunks - 1 else kept_last
        where = levels + 8 * number, packed + size * number, out + 4 * begin
        _decode_chunk(where, end - begin, room, bits, add)


@jit
def _decode_chunk(where, n, kept, bits, add):
    """Write or add a chunk's decoded values."""
    levels_at, packed_at, out = where
    behind, size = _size(kept, bits)
    values = floats(out, 0, n)
    levels = floats(levels_at, 0, 2)
    packed = numba.carray(pointer(packed_at), size, np.uint8)
    base = levels[0]
    step = levels[1]
    if np.isnan(base):
        values[:] = np.nan
        return
    if not add:
        values[:] = 0
    each = 8 // bits
    sign = 1 << (bits - 1)
    last = -1
    for j in range(kept):
        at = 3 * (j // 2)
        if j % 2:
            index = (packed[at + 1] >> 4) | (np.int64(packed[at + 2]) << 4)
        else:
            index = packed[at] | (np.int64(packed[at + 1] & 15) << 8)
        if index <= last or index >= n:
            break
        code = packed[behind + j // each] >> (bits * (j % each))
        magnitude = base + np.float32(code & (sign - 1)) * step
        values[index] += -magnitude if code & sign else magnitude
        last = index
