"""Files in a supervisor's memory that its workers write: failure reports, survival marks.

A worker opens `/proc/<supervisor>/fd/<number>`. Nothing is on the disk, and the files end with the
supervisor and all processes that have them open.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

_NAME = "paceline"  # begins the names of these files
_LINK = f"/memfd:{_NAME} "


class SupervisorFile:
    """File in this process's memory, which workers open by its path.

    Args:
        name: what the file is, for `ls -l /proc/<pid>/fd`.
    """

    def __init__(self, name: str) -> None:
        self._memory = os.memfd_create(f"{_NAME} {name}")
        self.path = f"/proc/{os.getpid()}/fd/{self._memory}"

    def close(self) -> None:
        """Release this process's descriptor."""
        os.close(self._memory)


def is_open(path: str | Path) -> bool:
    """Return whether the supervisor of a file still lives."""
    try:
        # The process number may be another program's by now, whose descriptor this would be.
        return os.readlink(path).startswith(_LINK)
    except OSError:
        return False


def process_of(path: str | Path) -> int:
    """Return the process number of a file's supervisor."""
    return int(Path(path).parts[2])


def write_supervisor_file(path: str | Path, text: str) -> None:
    """Replace the file's text, in one call.

    Raises:
        OSError: the supervisor has ended. Its process number may be another process's by now, so
            that a file of another kind isn't written.
    """
    if not is_open(path):
        raise FileNotFoundError(f"{path} is no file of a supervisor")
    Path(path).write_text(text)


class SupervisorFileLock:
    """Lock on a supervisor's file, which one process has at a time, until its end or `release`.

    A child that a process forks doesn't have its lock. A process that opens and closes the file
    once more loses it.

    Args:
        path: the file's path; where the supervisor has ended, there is no lock.

    Attributes:
        taken: whether another process has the lock.
    """

    def __init__(self, path: str | Path) -> None:
        self.taken = False
        self._file = -1
        if is_open(path):
            with suppress(OSError):  # the supervisor has ended just now
                self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if self._file >= 0:
            try:
                # Such a lock belongs to a process, not to its
                # children: a fork of the worker doesn't keep it.
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self.taken = True
                self.release()

    def release(self) -> None:
        """Give the lock back."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
