"""Queue of the frames to one peer: small frames go before the next chunk of bulk bytes."""

from __future__ import annotations

import threading
from collections import deque
from itertools import repeat

from paceline.cluster.membership.control_line.frames import CHUNK, chunk_header

# A peer that is stopped takes no bytes: what waits for it must not fill this machine's memory.
_MAX_SMALL = 2**26  # bytes of queued frames without bulk bytes
_TOGETHER = 2**16  # bytes of small frames that one system call sends


class Outbox:
    """Outbox: frames that any thread adds and the line's thread sends.

    Args:
        max_bulk: the bulk bytes that are queued at most.
    """

    def __init__(self, max_bulk: int) -> None:
        self._max_bulk = max_bulk
        self._lock = threading.Lock()  # guards all that follows
        self._small: deque[bytes] = deque()
        # (header of a frame, or nothing, and bytes behind it)
        self._bulk: deque[tuple[bytes, memoryview]] = deque()
        self._small_size = self._bulk_size = 0
        self._idle = True

    def add(self, frame: bytes, *bulk: memoryview) -> tuple[bool, bool]:
        """Queue a frame, and the bulk bytes behind it.

        Returns:
            whether there was room; whether the line's thread has to be woken for it.
        """
        with self._lock:
            if not bulk:
                if self._small_size + len(frame) > _MAX_SMALL:
                    return False, False
                self._small.append(frame)
                self._small_size += len(frame)
            else:
                size = sum(map(len, bulk))
                if self._bulk_size + size > self._max_bulk:
                    return False, False
                self._bulk += zip([frame, *repeat(b"", len(bulk) - 1)], bulk, strict=True)
                self._bulk_size += size
            wake = self._idle
            self._idle = False
            return True, wake

    def take(self) -> list[bytes | memoryview]:
        """Remove and return the bytes to send next; [] marks the outbox as idle."""
        with self._lock:
            if self._small:
                return [self._take_small()]
            if self._bulk:
                return self._take_chunk()
            self._idle = True
            return []

    def is_idle(self) -> bool:
        """Return whether everything has been taken."""
        with self._lock:
            return self._idle

    def _take_small(self) -> bytes:
        frames = [self._small.popleft()]
        size = len(frames[0])
        while self._small and size + len(self._small[0]) <= _TOGETHER:
            frames.append(self._small.popleft())
            size += len(frames[-1])
        self._small_size -= size
        return b"".join(frames)

    def _take_chunk(self) -> list[bytes | memoryview]:
        head, rest = self._bulk.popleft()
        chunk = rest[:CHUNK]
        rest = rest[CHUNK:]
        if rest:
            self._bulk.appendleft((b"", rest))
        self._bulk_size -= len(chunk)
        return [head + chunk_header(len(chunk)), chunk]
