"""The `OuterRule` protocol: new weights of a bucket from the workers' mean, at each merge.

Between merges each worker trains its own copy of the weights with its own optimizer (the *inner*
one). At a merge the workers compute the mean of their copies, and the outer rule makes of it the
weights from which the workers continue:

    own      this worker's weights, as they were taken for the merge
    anchor   the weights that all workers agreed on at the last merge
    mean     the mean of all workers' weights, each weighted by its samples since the last take

    own, anchor, state = rule.merge(own, anchor, mean, state)

All tensors are flat, (n,), of one bucket. A rule must treat each value by itself, because
`--bucket_mb` decides what a bucket has. Running statistics are merged by their mean, whatever the
rule.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import ConfigError

Merged = tuple[Tensor, Tensor, dict[str, Tensor]]  # new own, new anchor, new state


class OuterRule(Protocol):
    """Protocol of an outer rule: a pure function of its arguments.

    A rule of one's own derives from this class and has the method `merge`; it has `begin`, too, if
    it keeps a state. If it has numbers, make it a frozen dataclass: only the fields of a dataclass
    are compared between the ranks and at a resume.

    The new anchor and the new state must not depend on `own`: then they are equal on all workers.

    Inputs are never written. What is returned may share memory with the inputs and with each
    other. Each returned weight has the dtype of the one that it follows; the arithmetic and the
    state have at least float32.
    """

    @property
    def error_decay(self) -> float:
        """Factor of a lossy wire's residual in the next merge (error feedback)."""
        return 1.0

    @property
    def allows_delay(self) -> bool:
        """Whether a merge may be applied some local steps after its weights were taken."""
        return True

    def for_workers(self, workers: int) -> OuterRule:
        """Return the rule with the defaults that depend on the number of workers filled in."""
        return self

    def begin(self, anchor: Tensor) -> dict[str, Tensor]:
        """Return the state before the first merge; {} if the rule has none.

        Args:
            anchor: (n,), the weights with which all workers start.
        """
        return {}

    def merge(
        self, own: Tensor, anchor: Tensor, mean: Tensor, state: Mapping[str, Tensor]
    ) -> Merged:
        """Return this worker's new weights, the new anchor and the new state.

        Args:
            own: (n,), this worker's weights as they were taken for this merge.
            anchor: (n,), the anchor of the last merge, equal on all workers.
            mean: (n,), the sample-weighted mean of all workers' weights, equal on all workers.
            state: tensors of (n,), of the last merge, equal on all workers.
        """
        ...


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of a rule's arithmetic and state: float64 if a tensor has it, or float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def replaced_by(weights: Tensor, own: Tensor, anchor: Tensor, state: dict[str, Tensor]) -> Merged:
    """Return a merge after which all workers continue from the same weights, the anchor."""
    return weights.to(own.dtype), weights.to(anchor.dtype), state


def outer_gradient(anchor: Tensor, mean: Tensor) -> Tensor:
    """Return the outer gradient, anchor - mean, (n,), in float32 at least (arXiv 2311.08105)."""
    dtype = wide_dtype(anchor, mean)
    return anchor.to(dtype) - mean.to(dtype)


def require_state(rule: OuterRule, state: object, anchor: Tensor) -> dict[str, Tensor]:
    """Require that a rule's state has tensors like the anchor, by name.

    Raises:
        ConfigError: it hasn't.
    """
    if not isinstance(state, Mapping) or not all(_fits(one, anchor) for one in state.values()):
        raise _unfit_result(rule, "a state by name, of tensors of the anchor's shape", anchor)
    return dict(state)


def require_merged(rule: OuterRule, merged: object, anchor: Tensor) -> Merged:
    """Require that a rule's `merge` has returned weights, an anchor and a state.

    Raises:
        ConfigError: it hasn't.
    """
    if not isinstance(merged, tuple) or len(merged) != 3:
        raise _unfit_result(rule, "a tuple: own weights, anchor, state", anchor)
    own, new, state = merged
    if not _fits(own, anchor) or not _fits(new, anchor):
        raise _unfit_result(rule, "own weights and an anchor of the old one's shape", anchor)
    return own, new, require_state(rule, state, anchor)


def _fits(value: object, anchor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == anchor.shape


def _unfit_result(rule: OuterRule, what: str, anchor: Tensor) -> ConfigError:
    return ConfigError(
        f"The outer rule {type(rule).__name__} must return {what}, ({len(anchor)},); see "
        "paceline.OuterRule for what begin() and merge() return."
    )


def require_positive(rule: object, name: str) -> None:
    """Require that a field of a rule is a finite number greater than 0.

    Raises:
        ConfigError: it isn't.
    """
    value = getattr(rule, name)
    if not _is_number(value) or not 0 < value <= sys.float_info.max:
        raise _unfit(rule, name, "must be a finite number greater than 0")


def require_fraction(rule: object, name: str, *, closed: bool = False) -> None:
    """Require that a field of a rule is at least 0 and less than 1; with `closed`, in (0, 1].

    Raises:
        ConfigError: it isn't.
    """
    value = getattr(rule, name)
    if not _is_number(value) or not (0 < value <= 1 if closed else 0 <= value < 1):
        rule_text = "greater than 0 and at most 1" if closed else "at least 0 and less than 1"
        raise _unfit(rule, name, f"must be {rule_text}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unfit(rule: object, name: str, text: str) -> ConfigError:
    value = getattr(rule, name)
    return ConfigError(f"{type(rule).__name__}({name}={value!r}): {name} {text}.")
