"""A recorder's text file, appended to line by line; its failures are sentences."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.atomic_write import explained_writes
from paceline.recorder import NullRecorder

_ROOM_LIMIT_S = 2.0  # of a file's wait for room on a full disk
_RETRY_S = 0.02


def _always() -> bool:
    return True


@dataclass(frozen=True)
class MemberCheck:
    """Check whether this process is in the world, for what only a member of it may write.

    A process that is stopped between `lasts` and the call of the system which writes isn't noticed,
    so `lasts` comes last.

    Attributes:
        require: waits until that is known; raises an error where this process is outside.
        lasts: returns whether that is known now.
    """

    require: Callable[[], None]
    lasts: Callable[[], bool]


class LineFile(NullRecorder):
    """Recorder that appends lines to a file, each with one write; from any thread.

    Where the disk is full, a line waits a moment for room, since a checkpoint that is being written
    by this or another process may be what fills the disk: it is removed when it fails. What could
    not be written comes before the next line, so that no line is torn by another.

    Raises:
        PacelineError: the file can't be opened or written (disk, permissions); raised by the
            constructor, `write` and `close`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained_writes(self.path):
            self._file = path.open("ab", buffering=0)
        self._unwritten = b""
        self._waits = True  # until a wait for room has ended without any
        self._lock = threading.Lock()  # held while a line is written

    def write(self, line: str, check: MemberCheck | None = None) -> None:
        """Append a line; with `check`, as a member of the world only, whose error it raises."""
        data = f"{line}\n".encode()
        lasts = _always if check is None else check.lasts
        written = False
        while not written:
            if check is not None:
                check.require()  # may take a while: other threads write meanwhile
            with explained_writes(self.path), self._lock:
                written = self._flush(data, lasts)

    def close(self) -> None:
        """Close the file."""
        with explained_writes(self.path), self._lock:
            try:
                self._flush()
            finally:
                self._file.close()

    def _flush(self, data: bytes = b"", lasts: Callable[[], bool] = _always) -> bool:
        """Write what is unwritten, and `data`; unless `lasts()`, write none and return False."""
        deadline = time.monotonic() + _ROOM_LIMIT_S
        write = self._file.write
        unwritten = self._unwritten + data
        while unwritten:
            try:
                if not lasts():
                    return False
                written = write(unwritten)
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                if full and self._waits and time.monotonic() <= deadline:
                    time.sleep(_RETRY_S)
                    continue
                self._unwritten = unwritten
                self._waits = self._waits and not full
                raise
            self._unwritten = unwritten = unwritten[written:]
            lasts = _always  # no line is left torn
        return True
