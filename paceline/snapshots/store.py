"""In-memory snapshots of a run, by name: open while parts are copied, then held, then committed.

    open ── add, add, … ── hold ──▶ held ── commit ──▶ committed      (older ones are superseded)
      └── give_up: no trace

A snapshot is *held* when this rank has all its parts. It is *committed* when all ranks hold it, and
another rank, the backup holder, has a copy of what each rank alone has of it. At most two are
retained: the newest committed one and one that isn't committed yet, or two that aren't. What this
rank holds it retains until a newer one is committed, because it may have acknowledged that it holds
it. The memory of a superseded snapshot is used for the next copy.

A generation may start from a snapshot that wasn't committed: a part of it may be on one rank alone,
and a second loss then goes back to an older one. So all that isn't beyond the start is retained
until the generation commits a snapshot of its own, and until then there is room for one more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.errors import Message
from paceline.state.state_copy import copy_state

# The newest that is committed, and the one that may replace it once all ranks hold it.
_RETAINED = 2


class Borrowed(NamedTuple):
    """Committed snapshot whose memory isn't used again.

    Attributes:
        name: its name.
        state: its parts, which stay as they are.
    """

    name: SnapshotName
    state: Mapping[str, Mapping[Any, Any]]


class _Stage(Enum):
    OPEN = "open"
    HELD = "held"
    COMMITTED = "committed"


@dataclass(kw_only=True)
class _Snapshot:
    """Snapshot: its name, its stage, its state by part, and whether a reader retains its memory.

    Attributes:
        nbytes: bytes of its tensors, once it is held.
    """

    name: SnapshotName
    stage: _Stage = _Stage.OPEN
    state: dict[str, dict[Any, Any]] = field(default_factory=dict)
    borrowed: bool = False
    nbytes: int = 0


class SnapshotStore:
    """In-memory snapshots of this rank, oldest first; used by one thread, but for `borrow`."""

    def __init__(self) -> None:
        # A rescue borrows from another thread: without it, memory could be reused while it is lent.
        self._lending = threading.Lock()
        self._snapshots: list[_Snapshot] = []
        self._spare: dict[str, dict[Any, Any]] = {}  # state of one that is no longer needed
        self._limit = _RETAINED

    @property
    def full(self) -> bool:
        """Whether as many are held as may be, none of which may be dropped."""
        return len(self.held) >= self._limit

    @property
    def held(self) -> tuple[SnapshotName, ...]:
        """Names of the snapshots that are held here, the committed one included, oldest first."""
        return tuple(one.name for one in self._snapshots if one.stage is not _Stage.OPEN)

    @property
    def uncommitted(self) -> tuple[SnapshotName, ...]:
        """Names of the snapshots that are held here and not committed, oldest first."""
        return tuple(one.name for one in self._snapshots if one.stage is _Stage.HELD)

    @property
    def newest_committed(self) -> SnapshotName | None:
        """Name of the newest snapshot that all ranks hold, None before there is one."""
        names = (one.name for one in reversed(self._snapshots) if one.stage is _Stage.COMMITTED)
        return next(names, None)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in memory, those that await their next use included."""
        states = [*(one.state for one in self._snapshots), self._spare]
        # By identity: a copy that is under way takes tensors
        # of the spare state, which still lists them.
        return sum({id(tensor): _nbytes(tensor) for tensor in _tensors(states)}.values())

    @property
    def nbytes_required(self) -> int:
        """Bytes of two snapshots like the newest that is held; 0 before there is one."""
        held = [one.nbytes for one in self._snapshots if one.stage is not _Stage.OPEN]
        return _RETAINED * sum(held[-1:])

    def open(self, name: SnapshotName) -> None:
        """Begin a snapshot; one that is still open is given up. `full` must be False."""
        for one in [one for one in self._snapshots if one.stage is _Stage.OPEN]:
            self.give_up(one.name)
        assert not self.full, f"{self.held} are held, and none is superseded"
        assert self._find(name) is None, f"{name} exists"
        self._snapshots.append(_Snapshot(name=name))

    def add(self, name: SnapshotName, parts: Mapping[str, Mapping[Any, Any]]) -> None:
        """Copy values into parts of the open snapshot, beside the values that it has.

        A GPU's tensors are copied by its present stream, and must not be read before `hold`.

        Args:
            name: the open snapshot.
            parts: by part: tensors, and trees of tensors and plain values, by name.
        """
        state = self._get(name, _Stage.OPEN).state
        for part, copies in copy_state(parts, self._spare, pinned=True).items():
            # Merged, because a part comes in several calls: a bucket's as soon as it is final.
            state.setdefault(part, {}).update(copies)

    def hold(self, name: SnapshotName) -> None:
        """Close the open snapshot: all its parts are copied."""
        snapshot = self._get(name, _Stage.OPEN)
        snapshot.stage = _Stage.HELD
        snapshot.nbytes = sum(map(_nbytes, _tensors(snapshot.state)))
        self._spare = {}  # what the copy had no use for

    def commit(self, name: SnapshotName) -> None:
        """Note that all ranks hold a snapshot, and drop older ones; a dropped name is ignored."""
        snapshot = self._find(name)
        if snapshot is not None:
            snapshot = self._get(name, _Stage.HELD, _Stage.COMMITTED)
            snapshot.stage = _Stage.COMMITTED
            while self._snapshots[0] is not snapshot:
                self._drop(self._snapshots[0])
            self._limit = _RETAINED

    def give_up(self, name: SnapshotName) -> None:
        """Drop the open snapshot."""
        self._drop(self._get(name, _Stage.OPEN))

    def clear(self) -> None:
        """Drop all snapshots; their memory isn't used again."""
        with self._lending:
            self._snapshots = []
            self._spare = {}
            self._limit = _RETAINED

    def start_from(self, name: SnapshotName) -> None:
        """Start a generation from a held snapshot: drop newer ones, but no older one.

        It counts as committed. The memory of all so far isn't used again: a copy for another rank
        may still be sent from it.
        """
        start = self._get(name, _Stage.HELD, _Stage.COMMITTED)
        for one in self._snapshots:
            one.borrowed = True
        while self._snapshots[-1] is not start:
            self._drop(self._snapshots[-1])
        start.stage = _Stage.COMMITTED
        # Room for one more, or a full store would never take the snapshot whose commit empties it.
        self._limit = max(_RETAINED, len(self._snapshots) + 1)

    def state(self, name: SnapshotName) -> Mapping[str, Mapping[Any, Any]]:
        """Return the parts of a held snapshot; their memory is used again once it is superseded.

        Raises:
            KeyError: it isn't held here.
        """
        if name not in self.held:
            raise KeyError(name)
        return self._get(name, _Stage.HELD, _Stage.COMMITTED).state

    def borrow(self) -> Borrowed | None:
        """Return the newest committed snapshot, None before there is one; from any thread."""
        with self._lending:
            for one in reversed(self._snapshots):
                if one.stage is _Stage.COMMITTED:
                    one.borrowed = True
                    return Borrowed(one.name, one.state)
        return None

    def _drop(self, snapshot: _Snapshot) -> None:
        """Drop a snapshot; its memory awaits the next copy, unless it is borrowed."""
        with self._lending:
            self._snapshots.remove(snapshot)
            self._spare = {} if snapshot.borrowed else snapshot.state

    def _find(self, name: SnapshotName) -> _Snapshot | None:
        return next((one for one in self._snapshots if one.name == name), None)

    def _get(self, name: SnapshotName, *stages: _Stage) -> _Snapshot:
        snapshot = self._find(name)
        assert snapshot is not None, f"there is no snapshot {name}"
        assert snapshot.stage in stages, f"{name} is {snapshot.stage.value}"
        return snapshot


def memory_note(required: int, limit_mb: float) -> Message | None:
    """Return why snapshots are switched off; None if they aren't.

    Args:
        required: `SnapshotStore.nbytes_required`.
        limit_mb: the limit of their memory in MiB; 0: no limit.
    """
    if not limit_mb or required <= limit_mb * 2**20:
        return None
    mebibytes = required / 2**20
    return Message(
        "In-memory snapshots were switched off: two of them would take {} MiB per worker, "
        "more than {--snapshot_memory_mb} {:.10g}; raise the limit, or set it to 0.",
        f"{mebibytes:,.1f}" if mebibytes >= 1 else f"{mebibytes:.3g}",
        limit_mb,
    )


def _tensors(state: Any) -> Iterator[Tensor]:
    """Yield a tree's tensors."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors(value)


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's memory; of a sparse one (a momentum, say) its rows'."""
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes
