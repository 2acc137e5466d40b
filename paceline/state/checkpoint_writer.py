"""The checkpoint writer: writes snapshots to disk, in the background or in an emergency.

    snapshot in memory ── publish ──▶ writer thread ── file
                       └── rescue, on a signal or at a failure ──┘

A snapshot is written from its own memory, which no later snapshot overwrites. Training waits only
where the earlier file isn't written yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from torch import Tensor

from paceline.cluster.membership.protocol import Membership
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.errors import CheckpointError, PacelineError
from paceline.state.checkpoint_files import Checkpoints
from paceline.state.state_copy import finite

_LIMIT_S = 600.0  # of the wait for a file


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Checkpoint in memory: the training state before a step, as a file has it.

    Attributes:
        name: of the snapshot that it is made from.
        step: number of the run's completed steps.
        state: the file's entries, besides those that are the same in each file.
        parameters: the parameters, by name; only finite values are written.
        best: whether it is the best so far; if so, it is also published as the best checkpoint.
    """

    name: SnapshotName
    step: int
    state: Mapping[str, Any]
    parameters: Mapping[str, Tensor] = field(repr=False)
    best: bool = False


class WrittenFiles(Protocol):
    """Protocol of what reports this member's checkpoints to the others."""

    def written(self, checkpoint: Checkpoint, path: Path) -> None:
        """Note a file, before older ones are removed; called by the thread that has written it."""


class StateInMemory(Protocol):
    """Protocol of what has the newest state in memory."""

    def newest(self) -> Checkpoint | None:
        """Return the newest state that may be written, None without one; from any thread."""


class _LeaseEnded(Exception):
    """The write lease ended while a file was being written."""


class CheckpointWriter:
    """Checkpoint writer: every member has one, and it writes while the member is rank 0.

    Of a model in parts, the first rank of each part writes.

    Args:
        checkpoints: writes the checkpoint files.
        constant: further entries, which are the same in every file.
        membership: says whether this process is in the world: otherwise it writes no file but a
            rescued one. The writing thread may wake in a process that the others have expelled.
        files: notes the files.
        report: called once, from any thread, with a sentence for the user, when parameters are not
            finite, so that they aren't written.

    Attributes:
        memory: has what `rescue` writes; None: nothing yet.
        published: queue of (step, file), one for each file that was written.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        constant: Mapping[str, Any],
        membership: Membership,
        files: WrittenFiles | None = None,
        report: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.memory: StateInMemory | None = None
        self.published: SimpleQueue[tuple[int, Path]] = SimpleQueue()
        self._checkpoints = checkpoints
        self._constant = constant
        self._membership = membership
        self._files = files
        self._report = report
        self._writing = threading.Lock()  # held while a file is written
        self._written: SnapshotName | None = None  # the last one
        self._writer: threading.Thread | None = None
        self._failure: PacelineError | None = None
        self._deadline = 0.0  # of the file that is being written

    def publish(self, checkpoint: Checkpoint) -> None:
        """Begin to write a checkpoint; an earlier one that is being written comes first.

        Raises:
            CheckpointError: the earlier one couldn't be written.
        """
        self.wait()
        self._deadline = time.monotonic() + _LIMIT_S
        self._writer = threading.Thread(
            target=self._write_as_member, args=(checkpoint,), name="checkpoint", daemon=True
        )
        self._writer.start()

    def begin_generation(self, start: int) -> None:
        """Begin the files of a generation that continues after `start` steps, as its leader."""
        self._checkpoints.begin_generation(start)

    def rescue(self) -> int | None:
        """Write the newest state in memory, unless it is written or broken; from any thread.

        Returns:
            the number of completed steps in the newest file; None if there is none.
        """
        with self._writing:  # afterwards a file that is being written now isn't written again
            checkpoint = None if self.memory is None else self.memory.newest()
        if checkpoint is not None:
            self._write(checkpoint)
        return self._checkpoints.newest_step()

    def wait(self) -> None:
        """Return once the file is written.

        Raises:
            CheckpointError: it couldn't be, or isn't after `_LIMIT_S`.
        """
        if self._writer is not None:
            self._writer.join(max(0.0, self._deadline - time.monotonic()))
            if self._writer.is_alive():
                raise CheckpointError(
                    f"a checkpoint isn't written after {_LIMIT_S:g} s: check the disk of "
                    f"{self._checkpoints.folder}. Earlier checkpoints are unchanged."
                )
            self._writer = None
        self.check()

    def written(self, limit: float) -> bool:
        """Return whether the file is written, after at most so many seconds; raises as `wait`."""
        if self._writer is not None and time.monotonic() < self._deadline:
            self._writer.join(limit)
            if self._writer.is_alive():
                return False
        self.wait()
        return True

    def check(self) -> None:
        """Raise CheckpointError if a file couldn't be written; each failure is raised once."""
        if self._failure is not None:
            failure = self._failure
            self._failure = None
            raise failure

    def _write_as_member(self, checkpoint: Checkpoint) -> None:
        """Write a file while this process is in the world; anew, if it was stopped meanwhile."""

        def require_lease() -> None:
            if not self._membership.may_write(wait=False):
                raise _LeaseEnded

        while self._membership.may_write(wait=True):
            try:
                return self._write(checkpoint, require_lease)
            except _LeaseEnded:
                continue  # waits for the lease without the lock, which a rescue takes

    def _announce(self, checkpoint: Checkpoint, path: Path) -> None:
        if self._files is not None:
            self._files.written(checkpoint, path)

    def _write(self, checkpoint: Checkpoint, require: Callable[[], None] = lambda: None) -> None:
        step = checkpoint.step
        with self._writing:
            if checkpoint.name == self._written:
                return
            if not finite(checkpoint.parameters):
                # Once a run: each later checkpoint of it is as broken.
                report = self._report
                self._report = lambda text: None
                report(
                    f"parameters are NaN or infinite before step {step}: they are not saved. The "
                    "checkpoints of earlier steps are valid."
                )
                return
            state = {**self._constant, **checkpoint.state}
            try:
                path = self._checkpoints.write(
                    step,
                    state,
                    best=checkpoint.best,
                    require=require,
                    written=partial(self._announce, checkpoint),
                )
            except PacelineError as error:
                self._failure = error
                return
            # Only now, so that a rescue writes what this thread has failed to write.
            self._written = checkpoint.name
            self.published.put((step, path))
