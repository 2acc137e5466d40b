"""The arithmetic of wires and owners: as numba compiles it, or plain where it isn't installed.

Both have the functions of `Kernels` and give the same bits, but for a NaN's own. All tensors are on
the CPU, flat, contiguous and of one size unless said otherwise; `out` and `after` are written, and
overlap nothing that is read but for `after`, which may be `before`'s own memory. The interpreter's
lock is let go.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

from torch import Tensor

from paceline.codecs.pieces import Piece, Source


class Kernels(Protocol):
    """What each of the two modules has.

    Values are float32, but for `add_up`'s. `encode_…` codes v = weight * source + before
    into `data` and leaves v less what is decoded of it in `after`, 0 where that isn't finite.
    """

    def add_up(
        self,
        parts: Sequence[Sequence[Piece]],
        weights: Sequence[float],
        out: Tensor,
        *,
        past_caches: bool = False,
    ) -> None:
        """Let out be ((w0 * p0 + w1 * p1) + w2 * p2) + …, each step rounded.

        A part with weight 0 is left out, whatever it holds: no NaN of its gets in. Any floating
        dtype, the same for all; each part covers out by its pieces, and lies elsewhere.
        `past_caches`: the sums are read much later, or by another core, and needn't displace what
        this one is working on.
        """

    def encode_fp32(
        self, sources: Sequence[Source], weight: float, before: Tensor, data: Tensor, after: Tensor
    ) -> None:
        """Store values as they are: `after` is 0."""

    def encode_bf16(
        self, sources: Sequence[Source], weight: float, before: Tensor, data: Tensor, after: Tensor
    ) -> None:
        """Round values to the nearest bfloat16, ties to even; a NaN becomes 0x7fc0."""

    def decode_bf16(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Widen, and write or add."""

    def reduce_bf16(
        self,
        parts: Sequence[Tensor | None],
        sources: Sequence[Source],
        weight: float,
        before: Tensor,
        data: Tensor,
        after: Tensor,
        out: Tensor,
    ) -> None:
        """Let out be the parts' sum, encode it, and let out be what is decoded of that.

        The parts are `data` of others, added in their order, the first one written; None stands,
        once, for weight * source.
        """

    def encode_int8(
        self,
        sources: Sequence[Source],
        weight: float,
        before: Tensor,
        data: Tensor,
        after: Tensor,
        codes: int,
        block: int,
    ) -> None:
        """Round values / scale to integers; a scale a block, its largest magnitude / 127.

        Scales lie from the beginning of `data`, codes from byte `codes` on. A block whose largest
        magnitude is below 2^-119, so that its scale would be denormal, is coded as zeros; the
        scale of one that holds a NaN, an infinity, or 2^127 and more, is a NaN.
        """

    def reduce_int8(
        self,
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
        """As `reduce_bf16`."""

    def decode_int8(
        self, data: Tensor, out: Tensor, codes: int, block: int, *, add: bool = False
    ) -> None:
        """Multiply codes by their scales, and write or add."""


_KIND = "plain" if find_spec("numba") is None else "compiled"
KERNELS = cast(Kernels, import_module(f"paceline.codecs.kernels.{_KIND}"))

add_up = KERNELS.add_up
