"""Encodes and decodes by a codec, in memory whose surroundings are checked for writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.codecs.codec import Codec, Source

_GUARD = 64  # bytes around each memory


@dataclass(frozen=True, kw_only=True, eq=False)
class Coded:
    """What came of it.

    Attributes:
        data: what travels.
        after: what is kept.
        decoded: what arrives.
        untouched: nothing around these was written.
    """

    data: Tensor
    after: Tensor
    decoded: Tensor
    untouched: bool

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Coded)
        return (
            torch.equal(self.data, other.data)
            and same_bits(self.after, other.after)
            and same_bits(self.decoded, other.decoded)
        )


def code(
    codec: Codec,
    sources: Sequence[Source],
    weight: float,
    before: Tensor,
    *,
    in_place: bool = False,
) -> Coded:
    """Encode, and decode; adding to what is there must give what adding the decoded gives."""
    numel = before.numel()
    data, after, decoded = (_guarded(size) for size in (codec.size(numel), 4 * numel, 4 * numel))
    kept, arrived = _inside(after).view(torch.float32), _inside(decoded).view(torch.float32)
    if in_place:
        kept.copy_(before)
    codec.encode(sources, weight, kept if in_place else before, _inside(data), kept)
    codec.decode(_inside(data), arrived)
    total = torch.linspace(-3, 3, numel)
    expected = total + arrived
    codec.decode(_inside(data), total, add=True)
    assert same_bits(total, expected)
    return Coded(
        data=_inside(data),
        after=kept,
        decoded=arrived,
        untouched=all(
            bool((m[:_GUARD] == 171).all() and (m[-_GUARD:] == 171).all())
            for m in (data, after, decoded)
        ),
    )


def example(codec: Codec, numel: int, *, seed: int) -> tuple[Tensor, Coded]:
    """Encode gradients of many magnitudes; return the values, and what came of them."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.empty(numel).uniform_(-3, 3, generator=generator)
    gradient = torch.randn(numel, generator=generator) * 10**magnitudes
    before = torch.randn(numel, generator=generator)
    third = numel // 3
    sources = [(0, third, gradient[:third]), (third, numel, gradient[third:])]
    return gradient * 0.3 + before, code(codec, sources, 0.3, before)


@st.composite
def wild(draw: st.DrawFn) -> Tensor:
    """Any float32 there are, runs of them alike, up to some blocks."""
    runs = draw(st.lists(st.tuples(st.floats(width=32), st.integers(1, 300)), max_size=6))
    return torch.cat([torch.full((n,), value) for value, n in runs] or [torch.empty(0)])


def same(one: Tensor, other: Tensor, tolerance: float = 0.0) -> bool:
    """Return whether values are equal, and NaNs where the other has them."""
    return torch.allclose(one, other, rtol=0, atol=tolerance, equal_nan=True)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether float32 values have the same bits; NaNs may differ in theirs."""
    bits = [t.view(torch.int32).masked_fill(t.isnan(), 0x7FC00000) for t in (one, other)]
    return torch.equal(*bits)


def _guarded(size: int) -> Tensor:
    memory = torch.full((size + 2 * _GUARD,), 171, dtype=torch.uint8)
    memory[_GUARD : _GUARD + size] = 0
    return memory


def _inside(memory: Tensor) -> Tensor:
    return memory[_GUARD:-_GUARD]
