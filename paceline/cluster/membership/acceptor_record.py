"""A machine's acceptor record: text in shared memory that a kill at any moment leaves whole.

A machine is one acceptor of the vote on the next generation, and all its processes answer for it
from one record. The record is an anonymous file (memfd) that these processes map:

    page 0   magic | version | pid | start time    64 bits each; the process of the last update
    slot 0   version | length | checksum | text    the text of even versions
    slot 1   version | length | checksum | text    the text of odd versions

An update writes the slot that isn't current, then `version`: one word, stored in one instruction.
A process that is killed before that leaves the old text, one that is killed after it the new text.

Updates hold a lock of the kernel. It belongs to an open file description, so the kernel releases it
when the description's last process has ended. A forked child closes its copies for that reason, the
mapping's included. A process that is *stopped* in the middle of an update would keep all others
from voting, on its own loss too: one that waits longer than the limit kills it, and what it was
about to write is void. A reader takes no lock: it reads again if two updates came between.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self, TypeVar

from paceline.cluster.membership.process_identity import ProcessIdentity, is_stopped
from paceline.cluster.print_message import print_message
from paceline.comm.forked_children import close_in_children
from paceline.errors import CommError, CommTimeout, many

_T = TypeVar("_T")

# Generous, for the texts of large worlds: pages that nothing is written to take no memory.
_SIZE = 1 << 20
_LIMIT_S = 5.0
_MAGIC = int.from_bytes(b"PLACCEP2", "little")
_WORD = struct.Struct("Q")  # native: copied as one word
_HEADER = struct.Struct("QQQ")  # version, length, checksum
_VERSION = _WORD.size  # offset in page 0
_HOLDER = struct.Struct("QQ")  # pid, start time in clock ticks since boot
_HELD_BY = 2 * _WORD.size  # offset in page 0
_LOCK = struct.Struct("hhqqi4x")  # the kernel's struct flock: type, whence, start, length, pid
_SEALS = fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class RecordFull(CommError):
    """Error of an update whose text is longer than the record's slots."""


class AcceptorRecord:
    """Acceptor record of this machine, as one of its processes maps it; use `make` or `open`.

    Args:
        descriptor: an open file description of the memory, which no other record uses. The record
            closes it.
        limit: seconds that an update waits for updates of other processes and threads.
    """

    def __init__(self, descriptor: int, limit: float = _LIMIT_S) -> None:
        self._descriptor = descriptor
        self._limit = limit
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._slot_size = (len(self._memory) - mmap.PAGESIZE) // 2 // _WORD.size * _WORD.size
        own = ProcessIdentity.of_this_process()
        self._own = _HOLDER.pack(own.pid, own.started)
        self._updates = threading.Lock()  # the kernel's lock doesn't exclude this one's threads
        close_in_children(self, AcceptorRecord._release)

    @classmethod
    def make(cls, size: int = _SIZE, limit: float = _LIMIT_S) -> Self:
        """Make the memory of a new record, whose text is empty.

        Args:
            size: bytes; pages that hold no text take no memory.
            limit: seconds that an update waits for updates of other processes and threads.
        """
        descriptor = os.memfd_create("paceline acceptor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, *_SEALS)  # no process can cut the memory off from under the others
        record = cls(descriptor, limit)
        _WORD.pack_into(record._memory, 0, _MAGIC)
        return record

    @classmethod
    def open(cls, path: str, limit: float = _LIMIT_S) -> Self:
        """Open the record of another process of this machine.

        Args:
            path: the `path` of that process's record.
            limit: seconds that an update waits for updates of other processes and threads.

        Raises:
            CommError: that process has ended, or the path is of something else.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CommError(
                f"The acceptor record {path} can't be opened ({error.strerror}): the process that "
                "holds it must run on this machine, as the same user."
            ) from error
        if _begins_with_magic(descriptor):
            return cls(descriptor, limit)
        os.close(descriptor)
        raise CommError(
            f"{path} is no acceptor record of this version of Paceline: start all processes of a "
            "machine with the same version."
        )

    @property
    def path(self) -> str:
        """The path by which other processes open the record as long as this process runs."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def version(self) -> int:
        """The number of changes of the text; read without a lock."""
        value: int = _WORD.unpack_from(self._memory, _VERSION)[0]
        return value

    def read(self) -> str:
        """Return the text; waits for no other process.

        Raises:
            CommError: the memory is damaged.
        """
        deadline = time.monotonic() + self._limit
        while True:
            version = self.version
            start = self._slot(version)
            found, length, checksum = _HEADER.unpack_from(self._memory, start)
            start += _HEADER.size
            data = self._memory[start : start + min(length, self.capacity)]
            if found == version and zlib.crc32(data) == checksum:
                return data.decode()
            if self.version == version and time.monotonic() > deadline:
                raise CommError("The acceptor record of this machine is damaged: end the run.")

    def update(self, change: Callable[[str], tuple[str, _T]]) -> _T:
        """Replace the text, while no other process or thread replaces it.

        Args:
            change: returns the new text for the current one, and a result. It must be short, and
                must not update the record itself. If it raises, the text remains.

        Returns:
            the result.

        Raises:
            CommTimeout: another process or thread kept its update for longer than the limit, and
                isn't stopped by a signal: such a process is killed.
            RecordFull: the new text is too long; the old one remains.
        """
        with self._locked():
            old = self.read()
            new, result = change(old)
            if new != old:
                self._write(new.encode())
        return result

    @property
    def capacity(self) -> int:
        """The length of the longest text, in bytes of UTF-8."""
        return self._slot_size - _HEADER.size

    def close(self) -> None:
        """Unmap the memory, after an update of another thread; a second call does nothing."""
        with self._updates:
            self._release()

    def _write(self, data: bytes) -> None:
        if len(data) > self.capacity:
            raise RecordFull(
                f"The acceptor record of this machine holds {many(self.capacity, 'byte')}, and "
                f"{many(len(data), 'byte')} were to be written: the states of earlier generations "
                "must be removed from it."
            )
        version = self.version + 1
        start = self._slot(version)
        _HEADER.pack_into(self._memory, start, version, len(data), zlib.crc32(data))
        start += _HEADER.size
        self._memory[start : start + len(data)] = data
        # Last: a kill before this word leaves the old
        # text current, and a kill after it the new one.
        _WORD.pack_into(self._memory, _VERSION, version)

    def _slot(self, version: int) -> int:
        return mmap.PAGESIZE + version % 2 * self._slot_size

    @contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + self._limit
        if not self._updates.acquire(timeout=self._limit):
            raise self._late("thread")
        try:
            self._lock_description(deadline)
            try:
                self._memory[_HELD_BY : _HELD_BY + _HOLDER.size] = self._own
                yield
            finally:
                self._set_lock(fcntl.F_UNLCK)
        finally:
            self._updates.release()

    def _lock_description(self, deadline: float) -> None:
        """Lock by asking again: the kernel's call that waits has no limit."""
        # An update takes microseconds, so the first looks follow each other closely.
        pause = 0.0002
        while not self._set_lock(fcntl.F_WRLCK):
            if time.monotonic() > deadline:
                if not self._kill_stopped_holder():
                    raise self._late("process")
                deadline = time.monotonic() + _LIMIT_S  # for the kernel to end the process
            time.sleep(pause)
            pause = min(1.5 * pause, 0.005)

    def _kill_stopped_holder(self) -> bool:
        """Kill the process of the present update, if a signal has stopped it in the middle."""
        pid, started = _HOLDER.unpack_from(self._memory, _HELD_BY)
        if not is_stopped(pid, started):
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        print_message(
            f"Process {pid} was stopped while it changed what all processes of this machine vote "
            f"by; it was killed after {self._limit:g} s, so that the others can continue."
        )
        return True

    def _set_lock(self, kind: int) -> bool:
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(kind, 0, 0, 0, 0))
        except BlockingIOError:
            return False
        return True

    def _late(self, holder: str) -> CommTimeout:
        return CommTimeout(
            f"Another {holder} of this machine has been changing the acceptor record for "
            f"{self._limit:g} s: continue or end the processes of the run that are frozen."
        )

    def _release(self) -> None:
        if self._descriptor >= 0:
            self._memory.close()
            os.close(self._descriptor)
            self._descriptor = -1


def _begins_with_magic(descriptor: int) -> bool:
    with suppress(OSError):  # a pipe has no offsets
        return os.pread(descriptor, _WORD.size, 0) == _WORD.pack(_MAGIC)
    return False
