"""A recorder's text file, appended to line by line; its failures are sentences."""

from __future__ import annotations

import threading
from pathlib import Path

from paceline.atomic_write import explained_writes
from paceline.recorder import NullRecorder


class LineFile(NullRecorder):
    """Recorder that appends lines to a file, each with one write; from any thread.

    Raises:
        PacelineError: the file can't be opened or written (disk, permissions); raised by the
            constructor, `write` and `close`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained_writes(self.path):
            self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()  # held while a line is written

    def write(self, line: str) -> None:
        """Append a line."""
        with explained_writes(self.path), self._lock:
            self._file.write(line + "\n")

    def close(self) -> None:
        """Close the file."""
        with explained_writes(self.path):
            self._file.close()
