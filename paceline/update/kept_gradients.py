"""Gradients that a script keeps after a step: in the next one, backward adds to them.

In plain torch `.grad` then is the sum over the steps since `zero_grad()`. Rank r has x_r of it, and
what the ranks send is weighted by their shares w'_r of the next step. So a rank whose share has
changed rescales what it keeps, and together all ranks send the sum of the means:

    sum_r w'_r (w_r / w'_r x_r + g_r) = sum_r w_r x_r + sum_r w'_r g_r

Gradients that were reduced are the mean on all ranks. They stay as they are, because the weights
add up to one. Where this rank alone has looked at the means after a step, it gets its own part back
before the next backward, unless the script has changed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from weakref import ref

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError

Noted = dict[
    nn.Parameter, tuple[ref[Tensor], int]
]  # a gradient, and autograd's count of its writes


class KeptGradients:
    """Gradients that this rank keeps after a step.

    Attributes:
        weight: this rank's weight in the sum of what the ranks keep; None if that is the mean.
        before: what was kept before backward passes outside of a step; None: there were none.
        refused: gradients that mustn't be sent, by parameter; empty as long as nothing unusual
            happens.
        shown: means that the script sees in place of this rank's own gradients, with these.
    """

    def __init__(self) -> None:
        self.weight: float | None = None
        self.before: Noted | None = None
        self.refused: Noted = {}
        self.shown: dict[nn.Parameter, tuple[ref[Tensor], str, Tensor]] = {}
        self._reason = ""

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note what is kept, before a backward outside of a step adds to it."""
        if self.before is None:
            self.before = _noted(parameters)

    @torch.no_grad()
    def rescale(self, parameters: Iterable[nn.Parameter], weight: float) -> None:
        """Rescale what is kept for a step of another weight; no exchange reads gradients now.

        What can't be rescaled is refused, if the script doesn't zero it.
        """
        assert self.weight is not None
        kept = _noted(parameters) if self.before is None else self.before
        same = [
            p for p, (gradient, _) in kept.items() if p.grad is not None and p.grad is gradient()
        ]
        if not weight:
            lost = {p: kept[p] for p in same if p.grad is not None and bool(_values(p.grad).any())}
            self._refuse(lost, "and this rank has no samples now")
            return
        added = {p: kept[p] for p in same if p.grad is not None and p.grad._version > kept[p][1]}
        self._refuse(added, "when this rank had another share of the samples")
        values = [p.grad for p in same if p not in added and p.grad is not None]
        # In place: what is kept is known by its tensor's
        # identity, and the next backward adds to it.
        for value in values:
            value.mul_(self.weight / weight)
        self.weight = weight

    def show(self, own: Mapping[nn.Parameter, Tensor | None]) -> None:
        """Note that `.grad` shows the means now.

        Args:
            own: this rank's gradients, by parameter.
        """
        if self.weight is not None:
            for p, gradient in own.items():
                if p.grad is not None and gradient is not None and p.grad is not gradient:
                    self.shown[p] = ref(p.grad), _digest(p.grad), gradient

    def hide(self) -> None:
        """Put back this rank's own gradients where the script has left the means as they are."""
        for p, (mean, digest, own) in self.shown.items():
            # Autograd's count of writes isn't enough here:
            # code that clips through `.data` doesn't raise it.
            if p.grad is not None and p.grad is mean() and _digest(p.grad) == digest:
                p.grad = own
        self.shown = {}

    def require_zeroed(self, parameter: nn.Parameter, name: str, step: int) -> None:
        """Require that a parameter's gradient isn't one that mustn't be sent.

        Raises:
            ConfigError: it is; names the remedy.
        """
        if self._left(parameter):
            raise ConfigError(
                f"the gradient of {name} in step {step} includes one that was kept from an earlier "
                f"step, {self._reason}: call optimizer.zero_grad() in each step."
            )

    def end_step(self, weight: float | None) -> None:
        """Forget what was noted, as a step has ended; what is refused stays, if it is still there.

        Args:
            weight: this rank's in the step; None if the gradients were reduced.
        """
        self.before = None
        # As long as one is there, its weight is that of an earlier step, so none is noted over it.
        if not any(map(self._left, self.refused)):
            self.refused = {}
            self.weight = weight

    def forget(self) -> None:
        """Forget what is kept, because it is about to be zeroed in place."""
        self.refused = {}
        self.before = None
        self.weight = None
        self.shown = {}

    def _refuse(self, noted: Noted, reason: str) -> None:
        self.refused = noted
        self._reason = reason

    def _left(self, parameter: nn.Parameter) -> bool:
        noted = self.refused.get(parameter)
        return noted is not None and parameter.grad is not None and parameter.grad is noted[0]()


def _noted(parameters: Iterable[nn.Parameter]) -> Noted:
    return {p: (ref(p.grad), p.grad._version) for p in parameters if p.grad is not None}


def _values(gradient: Tensor) -> Tensor:
    """Return the values of a gradient, sparse or not."""
    return gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()


def _digest(gradient: Tensor) -> str:
    """Return a text that changes with the values, also where they are written through `.data`."""
    values = _values(gradient)
    # Two sums, because exchanged values leave the first as it was, and flipped signs the second.
    return f"{values.sum().item()} {values.abs().sum().item()}"
