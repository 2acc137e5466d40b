"""A rank's gradients of a bucket: large ones are read where they lie, small ones are copied.

    parameters   [ weight of a convolution ][ scale, shift ][ weight …  ][ scale, shift ]
    pieces       [ the gradient itself     ][ a copy       ][ itself … ][ a copy       ]

A large gradient is borrowed where backward left it, if its strides are its parameter's. It must not
be written until the bucket's sum has come. The others are copied.

Where other ranks of the machine read the contribution in this rank's window, a large gradient moves
there: its values are copied, and its tensor gets that memory in place of its own, which backward
uses again for the next layer. So a gradient is in memory once. A gradient that stays (`zero_grad`
in place, or none) is there already. A script that reads `.grad` gets a copy (`ParameterWatch`); a
tensor that one of its hooks has kept from an earlier step gets memory of its own again, before the
next gradient comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.codecs.codec import Piece
from paceline.codecs.kernels.compiled import add_up
from paceline.errors import ConfigError
from paceline.reduce.buckets import like
from paceline.reduce.put_engine.layout import BucketLayout

# Flags of a bucket's parameters, (parameters,), in a sum over some ranks: 0 if none of these ranks
# has a gradient of the parameter, 1 if all have one, 2 if some have.
Flags = NDArray[np.uint8]

_SMALL = 4096  # values; below it a copy is cheaper than a piece of its own


@dataclass(frozen=True, kw_only=True)
class LocalGradients:
    """Local gradients of a bucket: those of this rank in one step, as pieces.

    Attributes:
        pieces: tensors that cover the bucket's values, in order.
        weight: factor of the values in the sum.
        flags: flags of this rank alone: 1 for each parameter that has a gradient in the sum, 0 for
            the others.
        full: whether all flags are 1.
        borrowed: for each zero-copy gradient: the parameter's name, the gradient, and its autograd
            version counter when it was borrowed.
        sample: a view of some values of the first borrowed gradient, and a copy of these values,
            made when the gradient was borrowed.
    """

    pieces: Sequence[Piece]
    weight: float
    flags: Flags
    full: bool
    borrowed: Sequence[tuple[str, Tensor, int]]
    sample: tuple[Tensor, list[float]] | None

    def check_unwritten(self) -> None:
        """Check that no borrowed gradient was written.

        Raises:
            ConfigError: a gradient was written.
        """
        check_unwritten(self.borrowed)
        if self.sample is not None and not _equal_or_nan(self.sample[0].tolist(), self.sample[1]):
            raise _written_error(self.borrowed[0][0])  # through `.data`: autograd doesn't count it


def check_unwritten(borrowed: Sequence[tuple[str, Tensor, int]]) -> None:
    """Check that gradients weren't written.

    Args:
        borrowed: their names, the gradients, and autograd's counts of writes when they were sent.

    Raises:
        ConfigError: one was written.
    """
    for name, gradient, version in borrowed:
        if gradient._version != version:
            raise _written_error(name)


NO_GRADIENTS = LocalGradients(
    pieces=(), weight=0.0, flags=np.zeros(0, np.uint8), full=True, borrowed=(), sample=None
)


class GradientViews:
    """Gradient views of a bucket: present its gradients as pieces, zero-copy where possible.

    Args:
        templates: the parameters, or tensors of their shapes and strides.
        names: the parameters' names, for errors.
        shared: (bytes,), memory for the bucket's values, which other ranks read; None: there is
            none, and copies have memory of this object.
    """

    def __init__(
        self,
        layout: BucketLayout,
        templates: Sequence[Tensor],
        names: Sequence[str],
        shared: Tensor | None = None,
    ) -> None:
        self._names = names
        self._templates = [template.detach() for template in templates]
        self._large = [n for n, template in enumerate(templates) if _is_large(template)]
        self._strides = [template.stride() for template in templates]
        self._copies: Tensor | None = None  # (numel,)
        self._views: list[Tensor] = []
        self._copied: dict[tuple[int, int], Piece] = {}  # by their first value and the end
        self._numel = layout.numel
        self._dtype = layout.spec.dtype
        self._full = np.ones(len(templates), np.uint8)
        ends = list(accumulate(layout.spec.lengths))
        self._spans = list(zip([0, *ends], ends, strict=False))
        self._places: dict[int, Tensor] = {}  # of large gradients that move, in shared memory
        self._moved: dict[int, ref[Tensor]] = {}  # the gradients there
        if shared is not None:
            self._use(shared.view(self._dtype))
            for number in self._large if layout.spec.adopts else ():
                start, stop = (self._dtype.itemsize * value for value in self._spans[number])
                # A storage of its own: to save one is not to save the window.
                flat = torch.frombuffer(shared[start:stop].numpy(), dtype=self._dtype)
                self._places[number] = like(templates[number], flat)

    def local_gradients(self, gradients: Sequence[Tensor | None], weight: float) -> LocalGradients:
        """View a step's gradients; overwrites the copies of the last step's."""
        pieces: list[Piece] = []
        borrowed: list[tuple[str, Tensor, int]] = []
        copied_from = 0
        missing = [n for n, gradient in enumerate(gradients) if gradient is None]
        apart = set(missing)
        self._give_back(gradients)
        for number in self._large:
            gradient = gradients[number]
            if gradient is not None and self._has_strides(gradient, number):
                start, stop = self._spans[number]
                if number in self._places and weight and not gradient.requires_grad:
                    self._move(number, gradient)
                if copied_from < start:
                    pieces.append(self._copy(copied_from, start))
                pieces.append((start, stop, _flat(gradient)))
                borrowed.append((self._names[number], gradient, gradient._version))
                copied_from = stop
                apart.add(number)
        if copied_from < self._numel:
            pieces.append(self._copy(copied_from, self._numel))
        self._fill([n for n in range(len(gradients)) if n not in apart], missing, gradients)
        full = weight > 0 and not missing
        flags = self._full if full else np.full(len(gradients), weight > 0, np.uint8)
        flags[missing] = 0
        sample = _sample(borrowed[0][1]) if borrowed else None
        return LocalGradients(
            pieces=pieces, weight=weight, flags=flags, full=full, borrowed=borrowed, sample=sample
        )

    def _move(self, number: int, gradient: Tensor) -> None:
        """Move a large gradient to the shared memory, if it isn't there."""
        place = self._places[number]
        if gradient.data_ptr() != place.data_ptr():
            copy_past_caches(_flat(gradient), _flat(place))
            gradient.data = place
            self._moved[number] = ref(gradient)

    def _give_back(self, gradients: Sequence[Tensor | None]) -> None:
        """Give those that were moved and are others' now memory of their own."""
        for number, moved in self._moved.items():
            kept = moved()
            if kept is None or kept is gradients[number]:
                continue
            if kept.data_ptr() == self._places[number].data_ptr():
                kept.data = kept.detach().clone()

    def _has_strides(self, gradient: Tensor, number: int) -> bool:
        return (
            gradient.stride() == self._strides[number]
            and gradient.dtype is self._dtype
            and not gradient._is_view()
        )

    def _copy(self, start: int, stop: int) -> Piece:
        """Return the piece that holds the copies of some values."""
        if (start, stop) not in self._copied:
            self._copied[start, stop] = (start, stop, self._memory()[start:stop])
        return self._copied[start, stop]

    @torch.no_grad()
    def _fill(
        self, small: Sequence[int], missing: Sequence[int], gradients: Sequence[Tensor | None]
    ) -> None:
        """Copy gradients, and write zeros where there is none; both by their numbers."""
        if small or missing:
            self._memory()
        for number in missing:
            self._views[number].zero_()
        if small:
            copied: list[Tensor] = [gradients[number] for number in small]  # type: ignore[misc]
            torch._foreach_copy_([self._views[number] for number in small], copied)

    def _memory(self) -> Tensor:
        if self._copies is None:
            self._use(torch.empty(self._numel, dtype=self._dtype))
        assert self._copies is not None
        return self._copies

    def _use(self, memory: Tensor) -> None:
        """Copy into this memory, (numel,), from now on."""
        self._copies = memory
        self._views = [
            like(template, memory[start:stop])
            for template, (start, stop) in zip(self._templates, self._spans, strict=True)
        ]


def copy_past_caches(source: Tensor, target: Tensor) -> None:
    """Copy flat values that another core reads next; nothing where both are the same memory."""
    if source.data_ptr() != target.data_ptr():
        add_up([[(0, len(target), source)]], [1.0], target, past_caches=True)


def _written_error(name: str) -> ConfigError:
    return ConfigError(
        f"the gradient of {name} was written after optimizer.step(), while it was being sent: "
        "clear gradients with optimizer.zero_grad(), or call settle() before you write to them."
    )


def _is_large(template: Tensor) -> bool:
    """Return whether a gradient with its parameter's strides is borrowed, rather than copied."""
    dense = template.is_contiguous() or template.is_contiguous(memory_format=torch.channels_last)
    return template.numel() >= _SMALL and template.device.type == "cpu" and dense


def _flat(gradient: Tensor) -> Tensor:
    """View a dense gradient's memory, (numel,)."""
    detached = gradient.detach() if gradient.requires_grad else gradient
    return detached.as_strided((gradient.numel(),), (1,))


def _sample(gradient: Tensor) -> tuple[Tensor, list[float]]:
    """View 16 values from all over a dense gradient of `_SMALL` or more, and note them."""
    values = _flat(gradient)[:: gradient.numel() // 16][:16]
    return values, values.tolist()


def _equal_or_nan(now: list[float], then: list[float]) -> bool:
    return now == then or all(a == b or b != b for a, b in zip(now, then, strict=True))
