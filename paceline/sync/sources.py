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

from paceline.errors import ConfigError
from paceline.sync.bucket import like
from paceline.sync.layout import Run
from paceline.sync.pieces import Piece, cut

Flags = NDArray[np.uint8]

_SMALL = 4096  # values; below it a copy is cheaper than a piece of its own


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rank's values of a run in one step.

    Attributes:
        pieces: cover the run, in order.
        weight: what the values count.
        flags: (parameters,) of uint8, 1 where there is a gradient that counts.
        full: all of them are 1.
        lent: the gradients that are read where they lie, with their parameters' names and
            autograd's counts of writes.
        sample: a few values of the first of them.
    """

    pieces: Sequence[Piece]
    weight: float
    flags: Flags
    full: bool
    lent: Sequence[tuple[str, Tensor, int]]
    sample: Tensor | None

    def within(self, values: slice) -> list[Piece]:
        """Cut the pieces to some of the values; their places count from the first of these."""
        return cut(self.pieces, values)

    def refuse_writes(self) -> None:
        """Look whether what was lent is as it was.

        Raises:
            ConfigError: a gradient was written.
        """
        refuse_writes(self.lent)
        if self.sample is not None and not _same(_few(self.lent[0][1]), self.sample):
            raise _written(self.lent[0][0])  # through `.data`, which autograd doesn't count


def refuse_writes(lent: Sequence[tuple[str, Tensor, int]]) -> None:
    """Look whether gradients are as they were.

    Args:
        lent: their names, they themselves, and autograd's counts of writes then.

    Raises:
        ConfigError: one was written.
    """
    for name, gradient, version in lent:
        if gradient._version != version:
            raise _written(name)


NOTHING = Part(pieces=(), weight=0.0, flags=np.zeros(0, np.uint8), full=True, lent=(), sample=None)


class Sources:
    """Makes parts of gradients.

    Args:
        run: whose they are.
        templates: the parameters, or what has their shapes and strides.
        names: of the parameters, for errors.
    """

    def __init__(self, run: Run, templates: Sequence[Tensor], names: Sequence[str]) -> None:
        self._names = names
        self._templates = [template.detach() for template in templates]
        self._copies: Tensor | None = None  # (numel,)
        self._views: list[Tensor] = []
        self._run = run
        self._full = np.ones(len(templates), np.uint8)
        ends = [sum(run.spec.lengths[: n + 1]) for n in range(len(templates))]
        self._spans = list(zip([0, *ends], ends, strict=False))

    def part(self, gradients: Sequence[Tensor | None], weight: float) -> Part:
        """Make this step's part; overwrites the copies of the last one."""
        pieces: list[Piece] = []
        lent: list[tuple[str, Tensor, int]] = []
        copied_from, missing = 0, []
        for place, (gradient, (start, stop)) in enumerate(zip(gradients, self._spans, strict=True)):
            if gradient is not None and self._can_lend(gradient, place):
                pieces += self._copied(copied_from, start)
                flat = gradient.detach().as_strided((stop - start,), (1,))
                pieces.append((start, stop, flat))
                lent.append((self._names[place], gradient, gradient._version))
                copied_from = stop
            elif gradient is None:
                self._view(place).zero_()
                missing.append(place)
            else:
                self._view(place).copy_(gradient.detach())
        pieces += self._copied(copied_from, self._run.numel)
        full = weight > 0 and not missing
        flags = self._full if full else np.full(len(gradients), weight > 0, np.uint8)
        flags[missing] = 0
        sample = _few(lent[0][1]).clone() if lent else None
        return Part(pieces=pieces, weight=weight, flags=flags, full=full, lent=lent, sample=sample)

    def _can_lend(self, gradient: Tensor, place: int) -> bool:
        template = self._templates[place]
        return (
            gradient.numel() >= _SMALL
            and gradient.stride() == template.stride()
            and gradient.dtype == template.dtype
            and not gradient._is_view()
            and template.device.type == "cpu"
            and _dense(gradient)
        )

    def _copied(self, start: int, stop: int) -> list[Piece]:
        if start == stop:
            return []
        self._view(0)
        assert self._copies is not None
        return [(start, stop, self._copies[start:stop])]

    def _view(self, place: int) -> Tensor:
        if self._copies is None:
            self._copies = torch.empty(self._run.numel, dtype=self._run.spec.dtype)
            self._views = [
                like(template, self._copies[start:stop])
                for template, (start, stop) in zip(self._templates, self._spans, strict=True)
            ]
        return self._views[place]


def _written(name: str) -> ConfigError:
    return ConfigError(
        f"the gradient of {name} was written after optimizer.step(), while it was on its way: call "
        "optimizer.zero_grad(), or settle() before you write."
    )


def _few(gradient: Tensor) -> Tensor:
    """View some values from all over a dense gradient of `_SMALL` or more."""
    return gradient.detach().as_strided((16,), (gradient.numel() // 16,))


def _same(now: Tensor, then: Tensor) -> bool:
    return bool(((now == then) | then.isnan()).all())


def _dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
