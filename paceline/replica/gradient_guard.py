"""What became of a step's gradients on this rank: which are missing, sent, or changed since.

Gradients travel during backward, so whoever changes one afterwards (clips, unscales, zeroes it)
changes nothing that the others get, unless `reduce()` made it the global mean before. Such a change
is noticed at `optimizer.step()`: autograd counts the changes of every tensor. That costs some 50
microseconds a step for a ResNet-50. A gradient that is a view of something larger shares its count
with its neighbours; only its replacement is noticed. What `GradScaler.unscale_` does isn't counted:
a few values of the first gradient are kept for comparison, by whoever meets a scaler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket


class GradientGuard:
    """The gradients of the step that runs.

    A parameter is known by its place: to look one up in a dictionary takes longer than all the rest
    that is done here.

    Args:
        buckets: what is exchanged.
        names: the parameters' names, for errors.

    Attributes:
        parameters: those that are exchanged, with their buckets; a place is one's number here.
    """

    def __init__(self, buckets: Sequence[Bucket], names: Mapping[nn.Parameter, str]) -> None:
        self.parameters: Mapping[nn.Parameter, Bucket] = {
            p: bucket for bucket in buckets for p in bucket.parameters
        }
        self._buckets = list(self.parameters.values())
        self._names = [names[p] for p in self.parameters]
        self._sizes = [len(bucket.parameters) for bucket in buckets]
        self._missing = [True] * len(self._buckets)
        self._left_of = list(self._sizes)  # how many gradients a bucket is yet to get
        self._left: list[tuple[nn.Parameter, Tensor, int | None, int]] = []  # as backward left them
        self._number = 0
        self._sample: tuple[nn.Parameter, Tensor] | None = None  # a few values, as they were sent
        self._same: Tensor | None = None  # those values, when all were reduced

    def begin(self, number: int) -> None:
        """Expect all gradients of a step."""
        self._number = number
        self._missing = [True] * len(self._buckets)
        self._left_of = list(self._sizes)
        self._sample = self._same = None

    def arrive(self, place: int, parameter: nn.Parameter, *, exchanging: bool) -> Bucket | None:
        """Take a completed gradient; return its bucket if that is complete now.

        Args:
            place: the parameter's.
            parameter: whose gradient it is.
            exchanging: it will be sent; otherwise it accumulates.

        Raises:
            ConfigError: it was sent before, or it is sparse.
        """
        if not self._missing[place]:
            raise ConfigError(
                f"the gradient of {self._names[place]} was completed twice in step "
                f"{self._number}: put all backwards of a step but the last into no_sync(), before "
                "reduce(), and call activation checkpointing with use_reentrant=False."
            )
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise ConfigError(
                f"the gradient of {self._names[place]} is sparse, and sparse gradients can't "
                "be exchanged: make its layer with sparse=False."
            )
        if not exchanging:
            return None
        self._missing[place] = False
        self._left.append((parameter, gradient, _changes(gradient), place))
        if self._sample is None:
            self._sample = (parameter, _few(gradient).clone())
        bucket = self._buckets[place]
        self._left_of[bucket.index] -= 1
        return None if self._left_of[bucket.index] else bucket

    def reduce(self) -> None:
        """Allow any change: `.grad` becomes the global mean. No more gradients may arrive.

        Raises:
            ConfigError: as `refuse_changes`.
        """
        self.refuse_changes()
        if self._sample is not None and (now := self._sample[0].grad) is not None:
            sent = self._sample[1]
            self._same = ((_few(now) == sent) | sent.isnan()).all()
        self._missing = [False] * len(self._buckets)
        self._left.clear()

    def reduced_as_sent(self) -> bool:
        """Tell whether gradients were the same when they were sent and when they were reduced."""
        return self._same is None or bool(self._same)

    def end(self) -> None:
        """Let go of the gradients."""
        self._left.clear()

    def refuse_changes(self) -> None:
        """Look whether all gradients are as backward left them.

        Raises:
            ConfigError: one was changed, replaced or removed.
        """
        for p, gradient, version, place in self._left:
            if p.grad is not gradient or _changes(gradient) != version:
                raise ConfigError(
                    f"the gradient of {self._names[place]} was changed between backward and "
                    f"optimizer.step() in step {self._number}, after it had been sent: call "
                    "reduce() after backward, then clip, unscale or set what you like; zero it "
                    "after optimizer.step()."
                )


def _changes(gradient: Tensor) -> int | None:
    """Count the changes of a gradient so far; None if others' changes would be counted, too."""
    return None if gradient._is_view() else gradient._version


def _few(gradient: Tensor) -> Tensor:
    """View the first few values of a gradient."""
    return gradient.detach().reshape(-1)[:16]
