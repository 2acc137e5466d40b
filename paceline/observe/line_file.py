"""A recorder's text file, appended to line by line; its failures are sentences."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paceline.atomic_write import explained_writes
from paceline.errors import PacelineError
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

    def write(self, line: str, require: Callable[[], None] | None = None) -> None:
        """Append a line.

        Args:
            line: the line.
            require: called immediately before the write and after it; where it raises an error, the
                line isn't written, or taken back. A process that is stopped for a while in between
                leaves no line that it wasn't to write any more.
        """
        data = f"{line}\n".encode()
        with explained_writes(self.path), self._lock:
            if require is not None:
                require()
                before, earlier = os.fstat(self._file.fileno()), len(self._unwritten)
            self._unwritten += data
            self._flush()
            if require is not None:
                try:
                    require()
                except PacelineError:
                    os.truncate(self._file.fileno(), before.st_size + earlier)
                    os.utime(self._file.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))
                    raise

    def close(self) -> None:
        """Close the file."""
        with explained_writes(self.path), self._lock:
            try:
                self._flush()
            finally:
                self._file.close()

    def _flush(self) -> None:
        deadline = time.monotonic() + _ROOM_LIMIT_S
        while self._unwritten:
            try:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._waits:
                    raise
                if time.monotonic() > deadline:
                    self._waits = False
                    raise
                time.sleep(_RETRY_S)
