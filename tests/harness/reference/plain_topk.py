"""The topk codec in torch's operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.codecs.codec import MultiPassCodec, Source
from tests.harness.reference.plain import LARGE, TINY, weighed

CHUNK = 4096  # values; an index in it has 12 bits
STEPS = 7  # from the least code of 4 bits to the largest
UNIT = 2.0**30  # what a chunk's largest magnitude is where magnitudes are added up as integers
_SLAB = 8 * CHUNK  # values that torch's operations process at a time, as `weighed` yields them


@dataclass(frozen=True, kw_only=True)
class TopK(MultiPassCodec):
    """See `compiled_topk.TopK`."""

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

    def encode(
        self, sources: Sequence[Source], weight: float, before: Tensor, data: Tensor, after: Tensor
    ) -> None:
        """See `Codec`."""
        for begin, values in weighed(sources, weight, before):
            error = after[begin : begin + len(values)]
            for part, levels, packed in self._chunks(data, begin, len(values), after.numel()):
                rows = values[part].view(len(levels), -1)
                entries = self._choose(rows, levels)
                self._pack(entries, packed)
                rows.index_put_(entries.places, -entries.decoded(levels), accumulate=True)
                rows.masked_fill_(levels[:, :1].isnan(), 0)
                error[part].view(rows.shape).copy_(rows)

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See `Codec`."""
        if not add:
            out.zero_()
        for begin in range(0, out.numel(), _SLAB):
            values = out[begin : begin + _SLAB]
            for part, levels, packed in self._chunks(data, begin, len(values), out.numel()):
                rows = values[part].view(len(levels), -1)
                entries = self._unpack(packed, self.kept(rows.shape[1]))
                rows.index_put_(entries.places, entries.decoded(levels), accumulate=True)
                rows.masked_fill_(levels[:, :1].isnan(), torch.nan)

    def _chunks(
        self, data: Tensor, begin: int, numel: int, total: int
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield whole chunks, then a short one: values, levels (n, 2), entries (n, bytes)."""
        assert data.numel() == self.size(total)
        count, size = -(-total // CHUNK), self.chunk_size(CHUNK)
        levels = data[: 8 * count].view(torch.float32).view(count, 2)
        packed, first = data[8 * count :], begin // CHUNK
        whole, last = divmod(numel, CHUNK)
        behind = first + whole
        if whole:
            inside = packed[first * size : behind * size].view(whole, size)
            yield slice(whole * CHUNK), levels[first:behind], inside
        if last:
            yield slice(whole * CHUNK, numel), levels[behind:], packed[behind * size :][None]

    def _choose(self, rows: Tensor, levels: Tensor) -> _Entries:
        """Choose what is kept of chunks, (n, length), and write their levels."""
        largest = rows.abs().amax(1, keepdim=True)
        lost = ~(largest < LARGE)
        nothing = lost | (largest < TINY)
        chosen = _largest_of(rows, self.kept(rows.shape[1])) & ~nothing
        entries = _Entries.of(chosen, self.kept(rows.shape[1]))
        values = rows.gather(1, entries.indices).masked_fill_(~entries.valid, 0)
        entries.negative = values < 0
        find_levels = _two_means if self.bits == 2 else _even_levels
        largest.masked_fill_(nothing, 1)
        base, step, entries.codes = find_levels(values.abs_(), entries.valid, largest)
        levels[:, :1] = base.masked_fill_(nothing, 0).masked_fill_(lost, torch.nan)
        levels[:, 1:] = step.masked_fill_(nothing, 0)
        return entries

    def _pack(self, entries: _Entries, packed: Tensor) -> None:
        """Pack the entries of chunks, (n, bytes)."""
        kept, each = entries.indices.shape[1], 8 // self.bits
        behind = (3 * kept + 1) // 2
        indices = pad(entries.indices, (0, kept % 2))
        low, high = indices[:, ::2], indices[:, 1::2]
        triples = torch.stack([low & 255, low >> 8 | (high & 15) << 4, high >> 4], 2)
        packed[:, :behind] = triples.flatten(1)[:, :behind]
        codes = entries.codes | entries.negative.long() << (self.bits - 1)
        groups = pad(codes, (0, -kept % each)).view(len(codes), -1, each)
        packed[:, behind:] = (groups << self.bits * torch.arange(each)).sum(2)

    def _unpack(self, packed: Tensor, kept: int) -> _Entries:
        """Return the entries of chunks whose indices and codes are packed, (n, bytes)."""
        behind = (3 * kept + 1) // 2
        triples = pad(packed[:, :behind].long(), (0, -behind % 3)).view(len(packed), -1, 3)
        a, b, c = triples.unbind(2)
        indices = torch.stack([a | (b & 15) << 8, b >> 4 | c << 4], 2).flatten(1)[:, :kept]
        shifts = self.bits * torch.arange(8 // self.bits)
        codes = (packed[:, behind:, None].long() >> shifts).flatten(1)[:, :kept]
        sign = 1 << (self.bits - 1)
        valid = torch.ones_like(indices, dtype=torch.bool)
        valid[:, 1:] = indices[:, 1:] > indices[:, :-1]
        return _Entries(indices, valid, codes & (sign - 1), codes & sign > 0)


@dataclass
class _Entries:
    """What is kept of n chunks, (n, kept) each.

    Attributes:
        indices: in the chunk, ascending; 0 behind the last one.
        valid: whether there is an entry.
        codes: of the magnitudes.
        negative: the signs.
    """

    indices: Tensor
    valid: Tensor
    codes: Tensor
    negative: Tensor

    @classmethod
    def of(cls, chosen: Tensor, kept: int) -> _Entries:
        """Make a table of the chosen values, (n, length) of bool, without codes."""
        indices = torch.zeros(len(chosen), kept, dtype=torch.int64)
        row, column = chosen.nonzero(as_tuple=True)
        indices[row, (chosen.cumsum(1) - 1)[chosen]] = column
        valid = torch.arange(kept) < chosen.sum(1, keepdim=True)
        return cls(indices, valid, indices, valid)

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """The rows and columns of the entries."""
        row, _ = self.valid.nonzero(as_tuple=True)
        return row, self.indices[self.valid]

    def decoded(self, levels: Tensor) -> Tensor:
        """Return the entries' values, given base and step of each chunk, (n, 2)."""
        magnitudes = levels[:, :1] + self.codes * levels[:, 1:]
        return torch.where(self.negative, -magnitudes, magnitudes)[self.valid]


def _largest_of(rows: Tensor, kept: int) -> Tensor:
    """Return which values of each row are kept; of equal magnitudes, the first; no zeros."""
    magnitudes = rows.view(torch.int32) & 0x7FFFFFFF  # as numbers, in the order of the values
    least = magnitudes.topk(kept, dim=1).values[:, -1:]
    above, equal = magnitudes > least, magnitudes == least
    room = kept - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= room))) & (magnitudes > 0)


def _two_means(magnitudes: Tensor, valid: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return base, step and codes: 1 from the mean on. Sums are of integers, so of any order."""
    whole = (magnitudes.double() * (UNIT / largest.double())).long()
    count, total = valid.sum(1, keepdim=True), whole.sum(1, keepdim=True)
    upper = valid & (whole * count >= total)
    above, sum_above = upper.sum(1, keepdim=True), (whole * upper).sum(1, keepdim=True)
    unit = largest.double() * (1 / UNIT)
    high = (sum_above.double() / above.double() * unit).float()
    below = count - above
    low = ((total - sum_above).double() / below.double() * unit).float()
    low = torch.where(below > 0, low, high)
    return low, high - low, upper.long()


def _even_levels(
    magnitudes: Tensor, valid: Tensor, largest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return base, step and codes: 0 for the least magnitude, `STEPS` for the largest."""
    least = magnitudes.masked_fill(~valid, torch.inf).amin(1, keepdim=True)
    span = largest - least
    narrow = ~(span >= TINY)
    inverse = torch.div(STEPS, span).masked_fill_(narrow, 0)
    codes = ((magnitudes - least) * inverse).round_().masked_fill_(~valid, 0).long()
    return least, torch.div(span, STEPS).masked_fill_(narrow, 0), codes
