"""Notices who writes parameters between `optimizer.step()` and the update, which would undo it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket

Unit = tuple[Bucket, ...]
_Version = tuple[int, torch.dtype]


class ParameterGuard:
    """Counts the writes of parameters, as autograd does.

    Args:
        units: buckets that are updated together.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        units = list(dict.fromkeys(units))
        counted = set(_with_versions_of_their_own([bucket for unit in units for bucket in unit]))
        self._counted = {
            unit: [(p, name) for p, name in _named(unit) if p in counted] for unit in units
        }
        self._frozen: dict[Unit, list[_Version]] = {}  # and not yet updated

    def freeze(self) -> None:
        """Count from now on."""
        self._frozen = {
            unit: [_version(p) for p, _ in counted] for unit, counted in self._counted.items()
        }

    def refuse(self, unit: Unit) -> None:
        """Look, before a unit's update, whether its parameters are as they were.

        Raises:
            ConfigError: somebody has written or converted one.
        """
        frozen = self._frozen.pop(unit, None)
        if frozen is None:
            return
        counted = self._counted[unit]
        now = [(p._version, p.dtype) for p, _ in counted]
        if now == frozen:
            return
        written = next(n for (_, n), a, b in zip(counted, now, frozen, strict=True) if a != b)
        raise ConfigError(
            f"{written} was written between optimizer.step() and its update, which the "
            "next forward installs: call settle() after optimizer.step(), then write."
        )


def _named(unit: Unit) -> list[tuple[nn.Parameter, str]]:
    return [pair for b in unit for pair in zip(b.parameters, b.names, strict=True)]


def _with_versions_of_their_own(buckets: Sequence[Bucket]) -> list[nn.Parameter]:
    """Leave out parameters that are parts of one memory: autograd counts their writes together."""
    parameters = [p for bucket in buckets for p in bucket.parameters]
    owners = Counter(p.untyped_storage().data_ptr() for p in parameters)
    return [p for p in parameters if owners[p.untyped_storage().data_ptr()] == 1]


def _version(parameter: nn.Parameter) -> _Version:
    """Return what a write changes, by autograd's count, or a conversion (`model.half()`)."""
    return parameter._version, parameter.dtype
