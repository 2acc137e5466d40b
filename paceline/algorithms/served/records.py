"""Messages between workers and parameter servers, besides gradients and updated parameters.

    VALUES     parameters that a script has written, or the first ones       worker 0 ─▶ server
    RECORD     of a version: what it returns, by which hyperparameters        worker 0 ─▶ server
    FETCH      a request for a part of the optimizer's state                  worker   ─▶ server
    STATE      a part of the optimizer's state                                worker  ◀─▶ server
    STALENESS  how old an asynchronous worker's gradients were                worker  ◀─▶ server

A record is JSON. It names the optimizer's class, one of torch's `ELEMENTWISE`, so that a server
runs no code that a worker sends. Parameters are named by their keys: "bucket/index".
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import CommError
from paceline.reduce.put_engine.layout import BucketLayout, Layout
from paceline.reduce.rank_state import Ranges, cut_range
from paceline.update.owned_shards import parameter_ranges
from paceline.update.updater import ELEMENTWISE, StepHyperparameters

Bounds = Mapping[str, tuple[int, int]]
"""Ranges of parameters' values, (start, stop), by `parameter_key`."""

_CLASSES = {kind.__name__: kind for kind in ELEMENTWISE}


class Kind(IntEnum):
    """Kind of a message: its first byte."""

    VALUES = 0
    RECORD = 1
    FETCH = 2
    STATE = 3
    STALENESS = 4


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Record of a version of all buckets.

    Attributes:
        version: the version.
        optimizer: the name of the optimizer's class.
        param_groups: for each bucket, the index of its group in the optimizer.
        hyperparameters: of the update by the version's sums; None: there is none.
        pulls: without an update the present parameters return; otherwise the sums do.
    """

    version: int
    optimizer: str
    param_groups: tuple[int, ...]
    hyperparameters: StepHyperparameters | None
    pulls: bool = False

    @property
    def kind(self) -> type[Optimizer]:
        """The optimizer's class.

        Raises:
            CommError: there is none of that name.
        """
        if self.optimizer not in _CLASSES:
            raise CommError(f"A worker asks for updates by {self.optimizer!r}, which is unknown.")
        return _CLASSES[self.optimizer]

    def to_message(self) -> bytes:
        """Return the record as a message."""
        step = self.hyperparameters
        fields = {
            "version": self.version,
            "pulls": self.pulls,
            "optimizer": self.optimizer,
            "param_groups": self.param_groups,
            "groups": step and [_plain_values(group, self.optimizer) for group in step.groups],
            "scaling": step and {name: _plain(value) for name, value in step.scaling.items()},
        }
        return bytes([Kind.RECORD]) + json.dumps(fields).encode()

    @classmethod
    def from_message(cls, message: bytes) -> StepRecord:
        """Return the record that a message contains."""
        fields = json.loads(message[1:])
        step = None
        if fields["groups"] is not None:
            scaling = fields["scaling"].items()
            step = StepHyperparameters(
                groups=tuple(fields["groups"]),
                scaling={k: None if v is None else torch.tensor(v) for k, v in scaling},
            )
        return cls(
            version=fields["version"],
            optimizer=fields["optimizer"],
            param_groups=tuple(fields["param_groups"]),
            hyperparameters=step,
            pulls=fields["pulls"],
        )


def _plain_values(group: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    """Return the hyperparameters that the class knows: a script may add other entries."""
    return {name: _plain(value) for name, value in group.items() if name in _options(optimizer)}


@cache
def _options(optimizer: str) -> frozenset[str]:
    """Return the names of the hyperparameters of a class of optimizers."""
    kind: Any = _CLASSES[optimizer]
    return frozenset(kind([torch.empty(0)]).defaults)


def _plain(value: Any) -> Any:
    if isinstance(value, (Tensor, np.generic)):  # a schedule's formula may give numpy's numbers
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def to_message(kind: Kind, content: Any) -> bytes:
    """Return tensors and plain values as a message."""
    data = io.BytesIO()
    torch.save(content, data)
    return bytes([kind]) + data.getvalue()


def content_of(message: bytes) -> Any:
    """Return what `to_message` was given."""
    return torch.load(io.BytesIO(message[1:]), map_location="cpu", weights_only=True)


def parameter_key(bucket: int, index: int) -> str:
    """Return the name of a parameter in messages: its bucket, and its index there."""
    return f"{bucket}/{index}"


def served_buckets(layout: Layout) -> list[BucketLayout]:
    """Return the buckets of parameters; running statistics have a bucket of their own."""
    return [bucket for bucket in layout.buckets if bucket.spec.returns_parameters]


def shard_bounds(layout: Layout, server: int) -> Bounds:
    """Return the ranges of parameters that a server owns, given its rank."""
    group = layout.topology.group_of(server)
    return _bounds({bucket: bucket.shard(0, group) for bucket in served_buckets(layout)})


def worker_bounds(layout: Layout, worker: int) -> Bounds:
    """Return the ranges whose optimizer state a worker gets for snapshots, given its rank."""
    number = layout.topology.contributors.index(worker)
    return _bounds({bucket: bucket.worker_part(number) for bucket in served_buckets(layout)})


def _bounds(parts: Mapping[BucketLayout, slice]) -> Bounds:
    return {
        parameter_key(bucket.index, one.index): (one.start, one.stop)
        for bucket, part in parts.items()
        for one in parameter_ranges(bucket.spec.lengths, part)
    }


def ranges_within(ranges: Ranges, bounds: Bounds) -> dict[str, tuple[int, int, Any]]:
    """Copy out of ranges what lies within bounds."""
    found = {
        name: cut_range(entry, *bounds[name]) for name, entry in ranges.items() if name in bounds
    }
    return {name: entry for name, entry in found.items() if entry is not None}
