"""What a rank has of a run: its gradients where they lie, and copies of those that are small.

    parameters   [ weight of a convolution ][ scale, shift ][ weight …  ][ scale, shift ]
    segments     [ the gradient itself     ][ a copy       ][ itself … ][ a copy       ]

A large gradient is read where backward left it, if it lies there as its parameter does, and by
whoever sends or adds it; it must not be written until the run's sum has come. The rest is copied
into memory of this object's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.codecs.pieces import Piece, cut
from paceline.errors import ConfigError
from paceline.reduce.buckets import like
from paceline.reduce.put_engine.layout import BucketLayout

Flags = NDArray[np.uint8]

_SMALL = 4096  # values; below it a copy is cheaper than a piece of its own


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """A rank's values of a run in one step.

    Attributes:
        pieces: cover the run, in order.
        weight: what the values count.
        flags: (parameters,) of uint8, 1 where there is a gradient that counts.
        full: all of them are 1.
        borrowed: the gradients that are read where they lie, with their parameters' names and
            autograd's counts of writes.
        sample: a view of some values of the first of them, and what they were.
    """

    pieces: Sequence[Piece]
    weight: float
    flags: Flags
    full: bool
    borrowed: Sequence[tuple[str, Tensor, int]]
    sample: tuple[Tensor, list[float]] | None

    def within(self, values: slice) -> list[Piece]:
        """Cut the pieces to some of the values; their places count from the first of these."""
        return cut(self.pieces, values)

    def refuse_writes(self) -> None:
        """Look whether what was lent is as it was.

        Raises:
            ConfigError: a gradient was written.
        """
        refuse_writes(self.borrowed)
        if self.sample is not None and not _same(self.sample[0].tolist(), self.sample[1]):
            raise _written(self.borrowed[0][0])  # through `.data`, which autograd doesn't count


def refuse_writes(borrowed: Sequence[tuple[str, Tensor, int]]) -> None:
    """Look whether gradients are as they were.

    Args:
        borrowed: their names, they themselves, and autograd's counts of writes then.

    Raises:
        ConfigError: one was written.
    """
    for name, gradient, version in borrowed:
        if gradient._version != version:
            raise _written(name)


NOTHING = Contribution(
    pieces=(), weight=0.0, flags=np.zeros(0, np.uint8), full=True, borrowed=(), sample=None
)


class GradientViews:
    """Makes parts of gradients.

    Args:
        bucket_layout: whose they are.
        templates: the parameters, or what has their shapes and strides.
        names: of the parameters, for errors.
    """

    def __init__(
        self, bucket_layout: BucketLayout, templates: Sequence[Tensor], names: Sequence[str]
    ) -> None:
        self._names = names
        self._templates = [template.detach() for template in templates]
        self._large = [_is_large(template) for template in templates]
        self._strides = [template.stride() for template in templates]
        self._copies: Tensor | None = None  # (numel,)
        self._views: list[Tensor] = []
        self._copied: dict[tuple[int, int], Piece] = {}  # by where they begin and end
        self._run = bucket_layout
        self._full = np.ones(len(templates), np.uint8)
        ends = [sum(bucket_layout.spec.lengths[: n + 1]) for n in range(len(templates))]
        self._spans = list(zip([0, *ends], ends, strict=False))

    def contribution(self, gradients: Sequence[Tensor | None], weight: float) -> Contribution:
        """Make this step's part; overwrites the copies of the last one."""
        pieces: list[Piece] = []
        borrowed: list[tuple[str, Tensor, int]] = []
        copied_from, missing, small = 0, [], []
        for place, gradient in enumerate(gradients):
            if gradient is None:
                missing.append(place)
            elif self._large[place] and self._lies_right(gradient, place):
                start, stop = self._spans[place]
                if copied_from < start:
                    pieces.append(self._copy(copied_from, start))
                pieces.append((start, stop, _detached(gradient).as_strided((stop - start,), (1,))))
                borrowed.append((self._names[place], gradient, gradient._version))
                copied_from = stop
            else:
                small.append((place, _detached(gradient)))
        if copied_from < self._run.numel:
            pieces.append(self._copy(copied_from, self._run.numel))
        self._fill(small, missing)
        full = weight > 0 and not missing
        flags = self._full if full else np.full(len(gradients), weight > 0, np.uint8)
        flags[missing] = 0
        sample = _sample(borrowed[0][1]) if borrowed else None
        return Contribution(
            pieces=pieces, weight=weight, flags=flags, full=full, borrowed=borrowed, sample=sample
        )

    def _lies_right(self, gradient: Tensor, place: int) -> bool:
        return (
            gradient.stride() == self._strides[place]
            and gradient.dtype is self._run.spec.dtype
            and not gradient._is_view()
        )

    def _copy(self, start: int, stop: int) -> Piece:
        """Return what holds the copies of some values."""
        if (start, stop) not in self._copied:
            self._copied[start, stop] = (start, stop, self._memory()[start:stop])
        return self._copied[start, stop]

    def _fill(self, small: Sequence[tuple[int, Tensor]], missing: Sequence[int]) -> None:
        """Copy gradients to their places, and put zeros where there is none."""
        if small or missing:
            self._memory()
        for place in missing:
            self._views[place].zero_()
        if small:
            views = [self._views[place] for place, _ in small]
            torch._foreach_copy_(views, [gradient for _, gradient in small])

    def _memory(self) -> Tensor:
        if self._copies is None:
            self._copies = torch.empty(self._run.numel, dtype=self._run.spec.dtype)
            self._views = [
                like(template, self._copies[start:stop])
                for template, (start, stop) in zip(self._templates, self._spans, strict=True)
            ]
        return self._copies


def _written(name: str) -> ConfigError:
    return ConfigError(
        f"the gradient of {name} was written after optimizer.step(), while it was on its way: call "
        "optimizer.zero_grad(), or settle() before you write."
    )


def _is_large(template: Tensor) -> bool:
    """Tell whether a gradient that lies as its parameter is worth lending."""
    dense = template.is_contiguous() or template.is_contiguous(memory_format=torch.channels_last)
    return template.numel() >= _SMALL and template.device.type == "cpu" and dense


def _detached(gradient: Tensor) -> Tensor:
    return gradient.detach() if gradient.requires_grad else gradient


def _sample(gradient: Tensor) -> tuple[Tensor, list[float]]:
    """View some values from all over a dense gradient of `_SMALL` or more, and take them down."""
    few = _detached(gradient).as_strided((16,), (gradient.numel() // 16,))
    return few, few.tolist()


def _same(now: list[float], then: list[float]) -> bool:
    return now == then or all(a == b or b != b for a, b in zip(now, then, strict=True))
