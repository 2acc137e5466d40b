"""Wires: what gradients are on their way to their owner and back.

A lossy wire's error isn't lost: what the codes miss of a step's values is added to the next step's
(error feedback; Seide et al. 2014, Karimireddy et al. 2019), so that the sums of what is decoded
follow the sums of the true values, and never drift from them by more than one step's error:

    v = weight * gradient + before      data = code(v)      after = v - decode(data)

Two memories for `before` and `after` allow a step to be taken back: it never took effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.codecs.kernels.kernels import KERNELS, Kernels
from paceline.codecs.pieces import Source

_ALIGN = 64  # bytes, a cache line
_BLOCK = 256  # values that share a scale


class Codec(Protocol):
    """A codec of float32 values; tensors are flat, contiguous and on the CPU.

    Attributes:
        lossy: whether `after` can be anything but 0.
    """

    @property
    def lossy(self) -> bool: ...

    def size(self, numel: int) -> int:
        """Return the bytes of so many encoded values."""

    def encode(
        self,
        sources: Sequence[Source],
        weight: float,
        before: Tensor,
        data: Tensor,
        after: Tensor,
    ) -> None:
        """Encode v = weight * source + before, in one pass over memory.

        A value that is no number, or infinite, is decoded as one that isn't finite, so that who
        watches the loss sees it; what is kept of it is 0, so that it spoils no later step.

        Args:
            sources: of the n values, side by side; None counts as zeros.
            weight: with 0 all sources count as zeros, whatever they hold.
            before: (n,), what the last step missed.
            data: (size(n),) of uint8; what isn't needed of it for alignment is left as it is.
            after: (n,), what is missed now: v less what is decoded; may be `before` itself.
        """

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Write the values to out."""

    def add(self, data: Tensor, out: Tensor) -> None:
        """Add the values to out's."""

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
        """Add up what groups have, encode the sum, and let out be what is decoded of it.

        Args:
            parts: what groups have sent, (size(n),) each, in the order in which they are added;
                None stands, once, for weight * source.
            sources: as `encode`'s.
            weight: as well.
            before: (n,), what the last step missed of the sum.
            data: as `encode`'s.
            after: as well.
            out: (n,), overlaps nothing else.
        """


class MultiPassCodec:
    """Gives a wire `reduce` by its other methods, each of which goes over all values."""

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
        out.zero_()
        for part in parts:
            if part is not None:
                self.add(part, out)
                continue
            for start, stop, source in sources:
                if source is not None and weight:
                    out[start:stop] += weight * source
        self.encode([(0, len(out), out)], 1.0, before, data, after)
        self.decode(data, out)


class _KernelCodec:
    """Has the arithmetic of a twin."""

    def __init__(self, kernels: Kernels = KERNELS) -> None:
        self._kernels = kernels


class Fp32(MultiPassCodec, _KernelCodec):
    """Values as they are."""

    lossy = False

    def size(self, numel: int) -> int:
        return 4 * numel

    def encode(
        self,
        sources: Sequence[Source],
        weight: float,
        before: Tensor,
        data: Tensor,
        after: Tensor,
    ) -> None:
        self._kernels.encode_fp32(sources, weight, before, data, after)

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(torch.float32))

    def add(self, data: Tensor, out: Tensor) -> None:
        out.add_(data.view(torch.float32))


class Bf16(_KernelCodec):
    """A float32's upper half, rounded to the nearest, ties to even: 8 bits of precision.

    What is missed needs 16 bits at most, so that after + decoded is v, exactly; v that rounds to an
    infinity is lost.
    """

    lossy = True

    def size(self, numel: int) -> int:
        return 2 * numel

    def encode(
        self,
        sources: Sequence[Source],
        weight: float,
        before: Tensor,
        data: Tensor,
        after: Tensor,
    ) -> None:
        self._kernels.encode_bf16(sources, weight, before, data, after)

    def decode(self, data: Tensor, out: Tensor) -> None:
        self._kernels.decode_bf16(data, out)

    def add(self, data: Tensor, out: Tensor) -> None:
        self._kernels.decode_bf16(data, out, add=True)

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
        self._kernels.reduce_bf16(parts, sources, weight, before, data, after, out)


class Int8(_KernelCodec):
    """Integers from -127 to 127, a scale for 256 values: off by half a 127th of the largest.

    After + decoded is v, exactly. A block with a value that is no number, or of 2^127 and more, is
    lost as a whole.

    data: [ scales, float32 | up to a cache line | codes, int8 ]
    """

    lossy = True

    def size(self, numel: int) -> int:
        return _codes(numel) + numel

    def encode(
        self,
        sources: Sequence[Source],
        weight: float,
        before: Tensor,
        data: Tensor,
        after: Tensor,
    ) -> None:
        codes = _codes(after.numel())
        self._kernels.encode_int8(sources, weight, before, data, after, codes, _BLOCK)

    def decode(self, data: Tensor, out: Tensor) -> None:
        self._kernels.decode_int8(data, out, _codes(out.numel()), _BLOCK)

    def add(self, data: Tensor, out: Tensor) -> None:
        self._kernels.decode_int8(data, out, _codes(out.numel()), _BLOCK, add=True)

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
        codes = _codes(out.numel())
        self._kernels.reduce_int8(parts, sources, weight, before, data, after, out, codes, _BLOCK)


def _codes(numel: int) -> int:
    """Return where codes begin, behind the scales."""
    blocks = -(-numel // _BLOCK)
    return -(-4 * blocks // _ALIGN) * _ALIGN


CODECS: Mapping[str, Codec] = {"fp32": Fp32(), "bf16": Bf16(), "int8": Int8()}
