"""A recorder's text file, appended to line by line; its failures are sentences."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

from paceline.atomic_write import explained_writes
from paceline.cluster.membership.protocol import Membership
from paceline.recorder import NullRecorder

_ROOM_LIMIT_S = 2.0  # of a file's wait for room on a full disk
_RETRY_S = 0.02


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

    def write(self, line: str, membership: Membership | None = None) -> None:
        """Append a line; with `membership`, as a member only; raises its error."""
        data = f"{line}\n".encode()
        written = False
        while not written:
            if membership is not None:
                membership.require_member()  # may take a while: other threads write meanwhile
            with explained_writes(self.path), self._lock:
                written = self._flush(data, membership)

    def close(self) -> None:
        """Close the file."""
        with explained_writes(self.path), self._lock:
            try:
                self._flush()
            finally:
                self._file.close()

    def _flush(self, data: bytes = b"", membership: Membership | None = None) -> bool:
        """Write what is unwritten, and `data`; outside the world, write none and return False.

        A process that is stopped between the look and the call of the system which writes isn't
        noticed, so the look comes last.
        """
        deadline = time.monotonic() + _ROOM_LIMIT_S
        write = self._file.write
        unwritten = self._unwritten + data
        while unwritten:
            try:
                if membership is not None and not membership.may_write(wait=False):
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
            membership = None  # no line is left torn
        return True
