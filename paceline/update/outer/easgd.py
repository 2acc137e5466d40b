"""Elastic averaging: own weights and a centre variable pull each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.errors import ConfigError
from paceline.update.outer.outer_rule import (
    Merged,
    OuterRule,
    require_fraction,
    wide_dtype,
)


@dataclass(frozen=True, kw_only=True)
class EASGD(OuterRule):
    """EASGD: elastic averaging (Zhang, Choromanska, LeCun 2015, arXiv 1412.6651, section 3).

    The anchor is the paper's centre variable. It follows the mean, and each worker's own weights,
    which are not replaced, are pulled towards it; both use the centre before the merge:

        own    = own - alpha * (own - anchor)
        anchor = (1 - beta) * anchor + beta * mean

    The paper's elastic symmetry is beta = workers * alpha: workers and centre pull each other with
    the same force. There alpha = learning rate * rho. Its synchronous form pulls in each gradient
    step; here, as in its Algorithm 1 with communication period H, a merge pulls between two steps.

    Own weights differ after a merge, so evaluation and checkpoints' weights are the anchor's.

    Args:
        beta: moving rate of the anchor, greater than 0 and at most 1; the paper uses 0.9.
        alpha: elastic rate of own weights, greater than 0 and at most 1; None: beta / workers.

    Raises:
        ConfigError: a rate is outside its range.
    """

    beta: float = 0.9
    alpha: float | None = None

    def __post_init__(self) -> None:
        require_fraction(self, "beta", closed=True)
        if self.alpha is not None:
            require_fraction(self, "alpha", closed=True)

    @property
    def allows_delay(self) -> bool:
        """False: the pull is a change of the weights that it was computed from."""
        return False

    def for_workers(self, workers: int) -> EASGD:
        """Return the rule with alpha = beta / workers, unless alpha is given."""
        return self if self.alpha is not None else replace(self, alpha=self.beta / workers)

    def merge(
        self, own: Tensor, anchor: Tensor, mean: Tensor, state: Mapping[str, Tensor]
    ) -> Merged:
        """Return own weights pulled towards the anchor, and the anchor moved towards the mean.

        Raises:
            ConfigError: alpha is None, which `for_workers` replaces.
        """
        if self.alpha is None:
            raise ConfigError(f"{self} has no alpha: call for_workers(N) first, or give alpha.")
        dtype = wide_dtype(own, anchor, mean)
        wide_own = own.to(dtype)
        wide_anchor = anchor.to(dtype)
        pulled = wide_own - self.alpha * (wide_own - wide_anchor)
        moved = (1 - self.beta) * wide_anchor + self.beta * mean.to(dtype)
        return pulled.to(own.dtype), moved.to(anchor.dtype), {}
