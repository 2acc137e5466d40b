"""Lock between processes that the kernel releases when its holder is killed."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import threading
import time
from contextlib import suppress

from paceline.errors import DataError

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, process
_RETRY_S = 0.0005
# No holder needs a millisecond: one that has the lock after a second is stopped (SIGSTOP).
_LONGEST_S = 1.0
_LIMIT_S = 10.0  # after which not even killing it has helped


class ProcessLock:
    """Mutual exclusion of processes, and of this process's threads, over a file.

    It is a POSIX record lock, which belongs to a process: a killed process holds none.

    Args:
        file: descriptor of the file. No other descriptor of it may be closed in this process,
            because that would release the lock.
        kills: whether a process that holds the lock for a second is killed; otherwise this one
            waits for it, as the decode processes do, which are killed themselves.
    """

    def __init__(self, file: int, *, kills: bool) -> None:
        self._file = file
        self._kills = kills
        self._threads = threading.Lock()

    def __enter__(self) -> None:
        self._threads.acquire()
        if not self._kills:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            return
        begun = time.monotonic()
        while not self._locked():
            waited = time.monotonic() - begun
            if waited > _LONGEST_S:
                self._kill_holder()
            if waited > _LIMIT_S:
                self._threads.release()
                raise DataError(
                    f"A decode process that was killed has kept the queue of images for "
                    f"{_LIMIT_S:g} s; start the same command again to resume."
                )
            time.sleep(_RETRY_S)

    def __exit__(self, *error: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        self._threads.release()

    def _locked(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _kill_holder(self) -> None:
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, holder = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, wanted))
        if kind != fcntl.F_UNLCK and holder > 0:
            with suppress(ProcessLookupError):
                os.kill(holder, signal.SIGKILL)
