"""Copies the state before one step, each part at its own moment, and restores it in place.

The state before step t has the updates of the t steps before it. Nothing is settled for the copy:
each part is copied between its versions t and t + 1.

    begin        what isn't exchanged: buffers, frozen parameters, tracked objects, hyperparameters
    before_read  the parameters of a bucket, and the optimizer's state of them
    end          the buckets that nothing has read; the rank's own state (shards, residuals)

The state is keyed by the parameters' names, because buckets may be others when it is restored.

Of several models and optimizers, a snapshot has the parts of the first pair by their own names, and
those of pair k by "parameters k", "buffers k", …; the position is the first one's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.errors import ConfigError
from paceline.recorder import NullRecorder, Recorder
from paceline.reduce.buckets import Bucket
from paceline.reduce.rank_state import RankState
from paceline.replica.state.earlier_buffers import computed_buffers, named_buffers
from paceline.replica.state.entry_names import EntryNames
from paceline.replica.trained_parameters import WHOLE, Scope, TrainedParameters
from paceline.state.state_copy import copy_state
from paceline.state.stateful import Restorable, Stateful
from paceline.update.state_entries import restore_entries
from paceline.update.state_watch import plain_state

# Parts of a snapshot.
POSITION = "position"
TRACKED = "tracked"
PARAMETERS = "parameters"
REQUIRES_GRAD = "requires_grad"
BUFFERS = "buffers"
EXTRA = "extra_state"
OPTIMIZER = "optimizer"
GROUPS = "param_groups"
OTHER = "other_optimizer_state"
RANK = "rank"
LOCAL = "local"
SHARED = "shared"  # of averaged weights: a worker's own, and what all have alike
ENTRIES = "entries"
SAVED = "saved"  # for checkpoint files only
LOCAL_BUFFERS = "local_buffers"  # names of buffers that aren't compared between ranks
_PARTS = (POSITION, TRACKED, PARAMETERS, REQUIRES_GRAD, BUFFERS, EXTRA, OPTIMIZER, GROUPS, OTHER)
OWN_OPTIMIZER = (
    "the optimizer"  # name among the tracked objects, where it has a state dict of its own
)


@dataclass(frozen=True, kw_only=True)
class StateObjects:
    """Objects whose state a snapshot has.

    Attributes:
        model: the model.
        optimizer: its optimizer.
        tracked: further objects (schedulers, loss scalers, …), by name.
        saved: objects whose state only checkpoint files need, by name.
        tracked_entry: the entry of a checkpoint file that has the tracked objects' states; "": each
            has an entry of its own.
        entry_names: the names of the model's entries.
        scope: what the pair has of the model, where several optimizers train it.
        entries: of a checkpoint file, for the model's and the optimizer's state dict.
        others: the further models and optimizers, each a pair.
        local_buffers: whether buffers that the model computes are each rank's own.
    """

    model: nn.Module
    optimizer: Optimizer
    tracked: Mapping[str, Restorable] = field(default_factory=dict)
    saved: Mapping[str, Stateful] = field(default_factory=dict)
    tracked_entry: str = ""
    entry_names: EntryNames = field(default_factory=EntryNames)
    scope: Scope = WHOLE
    entries: tuple[str, str] = ("model", "optimizer")
    others: Sequence[StateObjects] = ()
    local_buffers: bool = False

    @property
    def pairs(self) -> Sequence[StateObjects]:
        """All pairs of a model and an optimizer, this one first."""
        return (self, *self.others)

    def trained(self) -> TrainedParameters:
        """List the present parameters."""
        return TrainedParameters.of(self.model, self.optimizer, self.scope)

    def entries_of(
        self, names: Mapping[nn.Parameter, str], buffers: Collection[str]
    ) -> dict[str, str]:
        """Return the names of the values in the model's state dict, by entry; as `EntryNames.of`.

        Args:
            names: the names of the pair's parameters.
            buffers: its buffers' names.
        """
        if not self.scope.first:
            return {}
        if self.scope.others:
            names = {p: name for name, p in self.model.named_parameters()}
        return self.entry_names.of(self.model, names, buffers)

    @property
    def all_tracked(self) -> Mapping[str, Restorable]:
        """The tracked objects, and the optimizer if its class has a state dict of its own."""
        kind = type(self.optimizer)
        plain = kind.state_dict is Optimizer.state_dict
        return self.tracked if plain else {**self.tracked, OWN_OPTIMIZER: self.optimizer}


class Receiver(Protocol):
    """Protocol of what receives a state part by part: `Snapshots`, which copy it, say."""

    def open(self, name: SnapshotName) -> None:
        """Begin a state."""

    def add(self, name: SnapshotName, parts: Mapping[str, Mapping[Any, Any]]) -> None:
        """Take values of parts as they are now."""

    def hold(self, name: SnapshotName) -> None:
        """End the state: all its parts are there."""


class StateCopier:
    """Copier of the state before one step into a snapshot.

    Args:
        snapshots: receives the values; where they are `Snapshots`, not `full`.
        name: of the snapshot.
        objects: the objects whose state is copied.
        position: of the run; plain values by name.
        recorder: receives the spans `snapshot`.
    """

    def __init__(
        self,
        snapshots: Receiver,
        name: SnapshotName,
        objects: StateObjects,
        position: Mapping[str, Any],
        recorder: Recorder | None = None,
    ) -> None:
        self._snapshots = snapshots
        self._name = name
        self._objects = objects
        self._position = position
        self._recorder = recorder or NullRecorder()
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
            copier = StateCopier(self._snapshots, self._name, objects, position, self._recorder)
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
            names: all parameters' names.
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
                EXTRA: {name: m.get_extra_state() for name, m in _with_extra_state(modules)},
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
            names: all parameters' names.
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
            self._name, {part + _suffix(self._pair): values for part, values in parts.items()}
        )

    def _options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group's options, and its parameters by name."""
        return {**group, "params": [self._names[p] for p in group["params"]]}

    @contextmanager
    def _span(self) -> Iterator[None]:
        """Measure a copy; whatever block reads first is around it: an evaluation's, say."""
        with self._recorder.span("snapshot"), torch.inference_mode(False), torch.no_grad():
            yield


def parts_of(state: Mapping[str, Mapping[Any, Any]], pair: int) -> Mapping[str, Mapping[Any, Any]]:
    """Return the parts that a snapshot has of one pair, by their own names."""
    parts = (*_PARTS, RANK, ENTRIES, SAVED)
    return {part: state[part + _suffix(pair)] for part in parts if part + _suffix(pair) in state}


def restore_state(
    state: Mapping[str, Mapping[Any, Any]], objects: StateObjects
) -> Mapping[Any, Any]:
    """Restore a snapshot in the same tensors; no replica may be bound to the model.

    The snapshot stays as it is, and may be restored again. Random streams aren't restored: each
    step derives its own.

    Args:
        state: the parts of a held snapshot.
        objects: the objects whose state it is.

    Returns:
        this rank's part of the divided state, for `Replica.enter_generation`; of several pairs,
        the parts by the pair's index, as text.

    Raises:
        ConfigError: model and optimizer have other parameters than in the snapshot.
    """
    own = {str(i): _restore_pair(parts_of(state, i), pair) for i, pair in enumerate(objects.pairs)}
    return own if objects.others else own["0"]


@torch.no_grad()
def _restore_pair(
    state: Mapping[str, Mapping[Any, Any]], objects: StateObjects
) -> Mapping[Any, Any]:
    """Restore a pair of a model and an optimizer; as `restore_state`."""
    model = objects.model
    optimizer = objects.optimizer
    names = objects.trained().names
    parameters = {name: p for p, name in names.items()}
    _refuse_others(parameters, state[PARAMETERS])
    for name, tracked in objects.all_tracked.items():
        if name in state[TRACKED]:
            tracked.load_state_dict(copy_state(state[TRACKED][name]))
        if isinstance(tracked, GradScaler) and tracked.is_enabled():
            reset_stages(tracked)
    modules = dict(model.named_modules()) if objects.scope.first else {}
    _restore_buffers(modules, state[BUFFERS])
    for name, module in _with_extra_state(modules):
        module.set_extra_state(copy_state(state[EXTRA][name]))
    for name, p in parameters.items():
        p.copy_(state[PARAMETERS][name])
        p.requires_grad_(state[REQUIRES_GRAD][name])
        p.grad = None
    _restore_optimizer(optimizer, parameters, state)
    return state[RANK]


def _suffix(pair: int) -> str:
    return f" {pair + 1}" if pair else ""


def _refuse_others(parameters: Mapping[str, nn.Parameter], saved: Mapping[str, Tensor]) -> None:
    """Require the parameters of a snapshot."""
    for name in parameters.keys() | saved.keys():
        own = parameters.get(name)
        copy = saved.get(name)
        if own is None or copy is None or (own.shape, own.dtype) != (copy.shape, copy.dtype):
            raise ConfigError(
                f"{name} was added, removed or converted since the snapshot was taken, so the "
                "snapshot doesn't fit the model: resume the run from a checkpoint."
            )


def _with_extra_state(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have state besides parameters and buffers."""
    plain = nn.Module.get_extra_state
    for name, module in modules.items():
        if type(module).get_extra_state is not plain:
            yield name, module


def _restore_buffers(modules: Mapping[str, nn.Module], saved: Mapping[str, Tensor | None]) -> None:
    for name, module, key in list(named_buffers(modules)):
        if name not in saved:
            delattr(module, key)
    for name, value in saved.items():
        prefix, _, key = name.rpartition(".")
        buffers = modules[prefix]._buffers
        own = buffers.get(key)
        if own is None or value is None or (own.shape, own.dtype) != (value.shape, value.dtype):
            near = next(modules[""].parameters(), torch.empty(0)) if own is None else own
            buffers[key] = None if value is None else value.to(near.device, copy=True)
        else:
            own.copy_(value)


def _restore_optimizer(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Mapping[Any, Any]],
) -> None:
    groups = optimizer.param_groups
    states = plain_state(optimizer)
    del groups[len(state[GROUPS]) :]
    group_of: dict[str, Mapping[str, Any]] = {}
    for group, saved in zip(groups, state[GROUPS].values(), strict=True):
        own = group.pop("params")
        own[:] = [parameters[name] for name in saved["params"]]
        options = {name: value for name, value in saved.items() if name != "params"}
        restore_entries(group, options, next(iter(own), torch.empty(0)), options)
        group["params"] = own
        group_of |= dict.fromkeys(saved["params"], group)
    for name, p in parameters.items():
        if name in state[OPTIMIZER]:
            entries = states.setdefault(p, {})
            restore_entries(entries, state[OPTIMIZER][name], p, group_of.get(name, {}))
        else:
            states.pop(p, None)
    for key in [key for key in states if not isinstance(key, Tensor) and key not in state[OTHER]]:
        del states[key]
    states.update(copy_state(state[OTHER]))


def reset_stages(scaler: GradScaler) -> None:
    """Forget what a loss scaler has done in an interrupted step, as its `update` does."""
    scaler._per_optimizer_states.clear()
