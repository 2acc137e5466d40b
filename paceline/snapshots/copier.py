"""Copies the state before one step, each part at its own moment.

The state before step t has the updates of the t steps before it. Nothing is settled for the copy:
each part is copied between its versions t and t + 1.

    begin        what isn't exchanged: buffers, frozen parameters, tracked objects, hyperparameters
    before_read  the parameters of a bucket, and the optimizer's state of them
    end          the buckets that nothing has read; the rank's own state (shards, residuals)

The state is keyed by the parameters' names, because buckets may be others when it is restored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.reduce.buckets import Bucket
from paceline.reduce.rank_state import RankState
from paceline.replica.copier import Copier
from paceline.replica.earlier_buffers import computed_buffers, named_buffers
from paceline.replica.state_parts import (
    BUFFERS,
    ENTRIES,
    EXTRA,
    GROUPS,
    LOCAL_BUFFERS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    POSITION,
    RANK,
    REQUIRES_GRAD,
    SAVED,
    TRACKED,
    part_suffix,
)
from paceline.snapshots.objects import StateObjects, with_extra_state
from paceline.timeline.timeline import Timeline
from paceline.update.state_watch import plain_state


class Receiver(Protocol):
    """Protocol of what receives a state part by part: `SnapshotStore`, which copies it, say."""

    def open(self, name: SnapshotName) -> None:
        """Begin a state."""

    def add(self, name: SnapshotName, parts: Mapping[str, Mapping[Any, Any]]) -> None:
        """Take values of parts as they are now."""

    def hold(self, name: SnapshotName) -> None:
        """End the state: all its parts are there."""


class StateCopier:
    """Copier of the state before one step into a snapshot.

    Args:
        snapshots: receives the values; where it is a `SnapshotStore`, not `full`.
        objects: the objects whose state is copied.
        position: of the run; plain values by name.
        timeline: measures the copies; None: nothing does.
        span: what their spans are called.
    """

    def __init__(
        self,
        snapshots: Receiver,
        name: SnapshotName,
        objects: StateObjects,
        position: Mapping[str, Any],
        timeline: Timeline | None = None,
        span: str = "snapshot",
    ) -> None:
        self._snapshots = snapshots
        self._name = name
        self._objects = objects
        self._position = position
        self._timeline = timeline or Timeline()
        self._span_name = span
        self._pair = 0
        self._remaining = [len(objects.pairs)]  # pairs to copy, of all copiers of the snapshot
        self._names: Mapping[nn.Parameter, str] = {}
        self._copied: set[Bucket] = set()
        self._events: dict[torch.device, Any] = {}  # of each GPU's last copy

    def pairs(self) -> list[StateCopier]:
        """Return a copier for each pair; the snapshot is held once the last one has ended."""
        copiers = []
        for number, objects in enumerate(self._objects.pairs):
            position = {} if number else self._position
            copier = StateCopier(
                self._snapshots, self._name, objects, position, self._timeline, self._span_name
            )
            copier._pair = number
            copier._remaining = self._remaining
            copiers.append(copier)
        return copiers

    def begin(
        self,
        names: Mapping[nn.Parameter, str],
        exchanged: Collection[nn.Parameter],
        buffers: Mapping[str, Tensor | None] | None = None,
    ) -> None:
        """Copy what isn't exchanged; the running statistics of the last step are installed.

        Args:
            exchanged: the parameters that `copy_buckets` will get.
            buffers: the buffers, by name; None: the model's present ones.
        """
        model = self._objects.model
        optimizer = self._objects.optimizer
        tracked = self._objects
        with self._span():
            self._names = names
            modules = dict(model.named_modules())
            if not self._pair:
                self._snapshots.open(self._name)
            groups = enumerate(optimizer.param_groups)
            other = plain_state(optimizer).items()
            if not self._objects.scope.first:
                modules = {}
                buffers = {}
            if buffers is None:
                buffers = {name: m._buffers[key] for name, m, key in named_buffers(modules)}
            parts: dict[str, Mapping[Any, Any]] = {
                POSITION: self._position,
                TRACKED: {n: one.state_dict() for n, one in tracked.all_tracked.items()},
                BUFFERS: buffers,
                EXTRA: {name: m.get_extra_state() for name, m in with_extra_state(modules)},
                REQUIRES_GRAD: {name: p.requires_grad for p, name in self._names.items()},
                GROUPS: {index: self._options(group) for index, group in groups},
                OTHER: {key: value for key, value in other if not isinstance(key, Tensor)},
                RANK: {},
                ENTRIES: self._objects.entries_of(self._names, buffers.keys()),
                SAVED: {name: one.state_dict() for name, one in self._objects.saved.items()},
            }
            if self._objects.local_buffers:
                parts[LOCAL_BUFFERS] = {name: True for name, _, _ in computed_buffers(model)}
            self._copy([p for p in self._names if p not in exchanged], parts)

    def copy_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Copy the parameters and optimizer states of buckets that have the last step's update."""
        fresh = [bucket for bucket in buckets if bucket not in self._copied]
        if fresh:
            with self._span():
                self._copied.update(fresh)
                self._copy([p for bucket in fresh for p in bucket.parameters], {})

    def copy_parameters(
        self, names: Mapping[nn.Parameter, str], values: Mapping[str, Tensor]
    ) -> None:
        """Copy values in place of the parameters, and nothing else; the state is held.

        Args:
            values: by name, in place of the parameters' own.
        """
        with self._span():
            self._snapshots.open(self._name)
            entries = self._objects.entries_of(names, ())
            self._add({PARAMETERS: values, ENTRIES: entries})
            self._snapshots.hold(self._name)

    def end(self, state: RankState | None, *, in_step: bool = True) -> None:
        """Copy the rank's own state, and hold the snapshot; all buckets are copied."""
        if state is not None or self._events:
            with self._span():
                self._add({RANK: {} if state is None else state.local(in_step=in_step)})
                for event in self._events.values():
                    event.synchronize()
        self._remaining[0] -= 1
        if not self._remaining[0]:
            self._snapshots.hold(self._name)

    def end_with(self, parts: Mapping[str, Mapping[Any, Any]]) -> None:
        """Copy further parts, and hold the snapshot; all parameters are copied."""
        with self._span():
            self._add(parts)
            for device in self._events:
                self._events[device] = torch.cuda.current_stream(device).record_event()
        self.end(None)

    def _copy(
        self, parameters: Sequence[nn.Parameter], parts: Mapping[str, Mapping[Any, Any]]
    ) -> None:
        """Copy parameters, the optimizer's state of them, and other parts."""
        states = plain_state(self._objects.optimizer)
        names = [self._names[p] for p in parameters]
        entries = {n: states[p] for n, p in zip(names, parameters, strict=True) if p in states}
        own = {PARAMETERS: dict(zip(names, parameters, strict=True)), OPTIMIZER: entries}
        self._add({**parts, **own})
        for device in {p.device for p in parameters if p.is_cuda}:
            self._events[device] = torch.cuda.current_stream(device).record_event()

    def _add(self, parts: Mapping[str, Mapping[Any, Any]]) -> None:
        self._snapshots.add(
            self._name, {part + part_suffix(self._pair): values for part, values in parts.items()}
        )

    def _options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group's options, and its parameters by name."""
        return {**group, "params": [self._names[p] for p in group["params"]]}

    @contextmanager
    def _span(self) -> Iterator[None]:
        """Measure a copy; whatever block reads first is around it: an evaluation's, say."""
        with self._timeline.span(self._span_name), torch.inference_mode(False), torch.no_grad():
            yield


class SeveralCopiers:
    """Copiers of the same state before a step, each with a receiver of its own."""

    def __init__(self, copiers: Sequence[Copier]) -> None:
        self._copiers = copiers

    def pairs(self) -> list[SeveralCopiers]:
        """Return what copies each pair."""
        by_pair = zip(*(copier.pairs() for copier in self._copiers), strict=True)
        return [SeveralCopiers(copiers) for copiers in by_pair]

    def begin(
        self,
        names: Mapping[nn.Parameter, str],
        exchanged: Collection[nn.Parameter],
        buffers: Mapping[str, Tensor | None] | None = None,
    ) -> None:
        """Begin all."""
        for copier in self._copiers:
            copier.begin(names, exchanged, buffers)

    def copy_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Copy buckets by all."""
        for copier in self._copiers:
            copier.copy_buckets(buckets)

    def copy_parameters(
        self, names: Mapping[nn.Parameter, str], values: Mapping[str, Tensor]
    ) -> None:
        """Copy values by all."""
        for copier in self._copiers:
            copier.copy_parameters(names, values)

    def end(self, state: RankState | None, *, in_step: bool = True) -> None:
        """End all."""
        for copier in self._copiers:
            copier.end(state, in_step=in_step)

    def end_with(self, parts: Mapping[str, Mapping[Any, Any]]) -> None:
        """End all with further parts."""
        for copier in self._copiers:
            copier.end_with(parts)
