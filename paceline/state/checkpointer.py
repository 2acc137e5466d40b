"""The checkpointer: a run's state in memory every few steps, and on disk now and then.

    step boundary ── capture ── snapshot in memory ── publish ──▶ writer thread ── file
                     (a copy)                  └──── rescue, on a signal ─────────┘

The steps wait for the copy in memory only. A snapshot is taken as often as it costs under one per
cent of the time, so that a signal in the middle of a long step loses little.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from torch import nn

from paceline.errors import PacelineError
from paceline.state.checkpoint_files import Checkpoints
from paceline.state.state_copy import copy_state, finite

_COST = 0.01  # of the time, for snapshots


class Stateful(Protocol):
    """Protocol of objects whose state is saved."""

    def state_dict(self) -> Any:
        """Return the state: tensors and plain values by name."""


class Restorable(Stateful, Protocol):
    """Protocol of objects whose state is saved and restored: optimizers, schedulers, scalers."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore a state."""


@dataclass(kw_only=True)
class _Snapshot:
    """In-memory snapshot of the training state before a step.

    Attributes:
        step: number of the step before which the state was captured.
        state: copies of the parts' state dicts, and the position.
        best: whether it is the best so far; if so, it is also published as the best checkpoint.
        written: whether it is on disk.
        wanted: whether it must be written even if a newer one is captured.
    """

    step: int
    state: Any
    best: bool
    written: bool = False
    wanted: bool = False


class Checkpointer:
    """Checkpointer of rank 0: takes snapshots in memory and writes them in the background.

    Args:
        parts: objects whose states are saved, by their key in the file.
        checkpoints: writes the checkpoint files.
        constant: further entries, which are the same in every file.
        report: called once, from any thread, with a sentence for the user, when parameters are not
            finite, so that they aren't written.
        clock: returns seconds since an arbitrary origin.

    Attributes:
        published: queue of (step, file), one for each file that was written.
    """

    def __init__(
        self,
        parts: Mapping[str, Stateful],
        checkpoints: Checkpoints,
        *,
        constant: Mapping[str, Any],
        report: Callable[[str], object] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts, self._checkpoints = dict(parts), checkpoints
        self._constant, self._report = constant, report
        self.published: SimpleQueue[tuple[int, Path]] = SimpleQueue()
        self._clock = clock
        self._last_due_at, self._cost = clock(), 0.0
        self._snapshot: _Snapshot | None = None
        self._spare: Any = None  # memory of a snapshot that is no longer needed
        self._writing = threading.Lock()  # held while a file is written
        self._writer: threading.Thread | None = None
        self._failure: PacelineError | None = None

    def snapshot_due(self) -> bool:
        """Tell whether a snapshot is due; the next call assumes that it is taken then.

        It is due if it costs under one per cent of the time since the last one was taken or due.
        """
        now = self._clock()
        due = self._cost <= _COST * (now - self._last_due_at)
        self._last_due_at = now if due else self._last_due_at
        return due

    def capture(
        self,
        step: int,
        position: Mapping[str, Any],
        gathered: Mapping[str, Any] | None = None,
        *,
        spent: float = 0.0,
        best: bool = False,
    ) -> None:
        """Copy the state before step `step`, which must be settled.

        Args:
            step: which.
            position: of the run.
            gathered: what else the file holds, by name.
            spent: seconds that went into that.
            best: it is the best so far.

        Raises:
            CheckpointError: an earlier checkpoint couldn't be written.
        """
        self._raise_failure()
        started = self._clock()
        state = dict(gathered or {})
        state |= {name: p.state_dict() for name, p in self._parts.items() if name not in state}
        copy = copy_state({**self._constant, **state, "position": dict(position)}, self._spare)
        old, self._snapshot = self._snapshot, _Snapshot(step=step, state=copy, best=best)
        # A thread that holds the lock may be reading the old one; a later one reads the new.
        free = old is not None and not old.wanted and not self._writing.locked()
        self._spare = old.state if old is not None and free else None
        self._last_due_at = self._clock()
        self._cost = self._last_due_at - started + spent

    def publish(self) -> None:
        """Begin to write the last snapshot; an earlier one that is being written comes first."""
        self.wait()
        if self._snapshot is not None:
            self._snapshot.wanted = True
            self._writer = threading.Thread(
                target=self._write, args=(self._snapshot,), name="checkpoint", daemon=True
            )
            self._writer.start()

    def rescue(self) -> None:
        """Write the last snapshot, unless it is written or broken; from any thread."""
        self._write(None)

    def wait(self) -> None:
        """Return once the file is written.

        Raises:
            CheckpointError: it couldn't be.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        self._raise_failure()

    def _write(self, wanted: _Snapshot | None) -> None:
        """Write a snapshot, by default the newest, which isn't overwritten under the lock."""
        with self._writing:
            snapshot = wanted or self._snapshot
            if snapshot is None or snapshot.written:
                return
            if not self._sound(snapshot):
                report, self._report = self._report, lambda text: None
                report(
                    f"parameters are NaN or infinite before step {snapshot.step}: they are not "
                    "saved. The checkpoints of earlier steps are valid."
                )
                return
            try:
                path = self._checkpoints.write(snapshot.step, snapshot.state, best=snapshot.best)
            except PacelineError as error:
                self._failure = error
                return
            snapshot.written, snapshot.wanted = True, False
            self.published.put((snapshot.step, path))

    def _sound(self, snapshot: _Snapshot) -> bool:
        """Tell whether what the model has learned is finite; a buffer may hold infinities."""
        model, state = self._parts["model"], snapshot.state["model"]
        if not isinstance(model, nn.Module):
            return finite(state)
        return finite([state[name] for name, _ in model.named_parameters() if name in state])

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
