"""Hook guard: refuses a script's hooks that make of a gradient what depends on the number of ranks.

In one process a hook on a parameter gets the gradient of the global batch, and here the one of this
rank's samples. What it makes of that has the right mean where it multiplies it: by a mask, or by a
factor that doesn't depend on the gradient.

    gradient ─▶ before ─▶ register_hook's ─▶ after
        .grad ─▶ before ─▶ register_post_accumulate_grad_hook's ─▶ after ─▶ exchange

torch numbers all hooks. So a backward pass before which none was registered costs nothing; another
one, a look at the parameters' hooks, some 30 microseconds for a ResNet-50. The host waits for the
comparison of a gradient that a hook has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.errors import ConfigError
from paceline.replica.live_hooks import LiveHook

_Hooks = dict[int, Any]
_BEFORE_ACCUMULATION = attrgetter("_backward_hooks")
_AFTER_ACCUMULATION = attrgetter("_post_accumulate_grad_hooks")
_ROUNDING = 8  # of a factor, in units of the last place


class HookGuard:
    """Hook guard of some parameters.

    Args:
        parameters: the parameters, each of which has a hook of its own after accumulation.

    Attributes:
        compares: whether changes are refused in the backward pass that follows a look.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._parameters = parameters
        self._names = names
        self.compares = True
        self._next = -1  # the number of the first hook that the last look can't have seen
        self._comparisons: dict[tuple[int, bool], _Comparison] = {}

    def look(self, own: Sequence[RemovableHandle], *, compares: bool) -> None:
        """Look for hooks that a script has registered or removed; before a backward pass.

        The replica's own hooks come last from then on: what is sent is what a script's have made.

        Args:
            own: the parameters' own hooks.
            compares: whether changes are refused: not where there is one rank, nor of gradients
                that aren't exchanged.
        """
        self.compares = compares
        if RemovableHandle.next_id == self._next:
            return
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of them by the script
            before = [*map(_BEFORE_ACCUMULATION, self._parameters)]
            after = [*map(_AFTER_ACCUMULATION, self._parameters)]
        numbers = {handle.id for handle in own}
        for accumulated, tables in ((False, before), (True, after)):
            for index, hooks in enumerate(tables):
                place = index, accumulated
                others = 0 if hooks is None else len(hooks) - accumulated  # besides the own one
                if hooks is not None and (others or place in self._comparisons):
                    self._surround(index, hooks, numbers, accumulated=accumulated)
        self._next = RemovableHandle.next_id

    def close(self) -> None:
        """Remove what compares gradients."""
        for comparison in self._comparisons.values():
            comparison.close()
        self._comparisons.clear()

    def _surround(
        self, index: int, hooks: _Hooks, own: Collection[int], *, accumulated: bool
    ) -> None:
        """Compare the gradient before a script's hooks with the one after them."""
        place = index, accumulated
        present = self._comparisons.get(place)
        mine = set() if present is None else present.numbers
        foreign = {
            number: hook
            for number, hook in hooks.items()
            if number not in own and number not in mine and not isinstance(hook, LiveHook)
        }
        if foreign.keys() == (set() if present is None else present.compared):
            return
        if present is not None:
            present.close()
            del self._comparisons[place]
        if foreign:
            self._comparisons[place] = _Comparison(
                self, self._names[index], hooks, foreign, accumulated=accumulated
            )


class _Comparison:
    """Comparison of a gradient before and after a script's hooks on one parameter.

    Args:
        guard: knows whether changes of the gradient are refused.
        name: the parameter's name.
        hooks: the list of hooks that the script's are in, by their numbers.
        foreign: the script's.
        accumulated: whether they get the parameter, after accumulation, or the gradient.
    """

    def __init__(
        self,
        guard: HookGuard,
        name: str,
        hooks: _Hooks,
        foreign: _Hooks,
        *,
        accumulated: bool,
    ) -> None:
        self._name = name
        self._guard = guard
        self._accumulated = accumulated
        self.compared = set(foreign)
        self._given: tuple[Tensor, int, Tensor] | None = None
        self._factor: float | complex | None = None
        self._handles = RemovableHandle(hooks), RemovableHandle(hooks)
        first, last = self._handles
        others = {number: hook for number, hook in hooks.items() if number not in foreign}
        hooks.clear()  # the engine calls them in the order of their insertion
        hooks[first.id] = LiveHook(self._before)
        hooks.update(foreign)
        hooks[last.id] = LiveHook(self._after)
        hooks.update(others)

    @property
    def numbers(self) -> set[int]:
        """The numbers of the two hooks that compare."""
        return {handle.id for handle in self._handles}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, value: Tensor) -> None:
        gradient = self._gradient(value)
        if gradient is not None and self._guard.compares:
            self._given = gradient, gradient._version, gradient.detach().clone()

    def _after(self, value: Tensor) -> None:
        given = self._given
        self._given = None
        gradient = self._gradient(value)
        if given is None or gradient is None:
            return
        object_before, version, before = given
        if gradient is object_before and gradient._version == version:
            same = self._factor in (None, 1.0)
            self._factor = 1.0
        else:
            same = self._is_multiple(before, gradient.detach())
        if not same:
            raise ConfigError(
                f"a hook changes the gradient of {self._name} in backward, where it is this rank's "
                "alone, otherwise than by a mask or a constant factor, so the result would depend "
                "on the number of ranks: change gradients after backward(), where a use of .grad "
                "finds the mean over the global batch."
            )

    def _gradient(self, value: Tensor) -> Tensor | None:
        if not self._accumulated:
            return value
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of it by the script
            return value.grad

    @torch.no_grad()
    def _is_multiple(self, before: Tensor, after: Tensor) -> bool:
        """Return whether each value was multiplied by 0, or by a factor that all others have, too.

        The factor is the one of earlier passes. A value that isn't finite may become 0 only where
        it is masked, which can't be told from a repair: that counts as none.
        """
        if before.layout is not torch.strided or before.shape != after.shape:
            return False
        limits = torch.finfo(before.dtype)
        finite = before.isfinite()
        size = before.abs()
        kept = finite & (after != 0)
        wrong = (before == 0) & (after != 0) | ~finite & after.isfinite()
        if not bool(kept.any()):
            return not bool(wrong.any())
        index = torch.where(kept, size, 0).argmax()
        factor = (after.flatten()[index] / before.flatten()[index]).item()
        tolerance = _ROUNDING * limits.eps
        allowed = tolerance * (abs(factor) * size + limits.tiny)
        wrong |= kept & ((after - factor * before).abs() > allowed)
        if bool(wrong.any()):
            return False
        if self._factor is None:
            self._factor = factor
        return abs(factor - self._factor) <= tolerance * abs(self._factor)
