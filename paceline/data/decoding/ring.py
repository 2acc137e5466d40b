"""Ring of batch buffers: memory that decode processes fill with the samples of batches.

    one file in memory (memfd)   │ buffer │ buffer │ buffer │ …
    a buffer                     records (n,) │ labels (n,) │ samples (n, bytes of a sample)

A buffer is used again once its batch is on the device. Where batches become larger than the free
buffers, new ones take their place at the file's end, and the old ones' memory is given back. A
memfd takes nothing of /dev/shm, which is small in containers. For a device, buffers are pinned:
copies to the device need no further copy, and the host doesn't wait for them. Pinned memory is all
there; that of other buffers is there once it is written to.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paceline.data.order import Indices
from paceline.data.source import Pixels
from paceline.errors import DataError

_PAGE = mmap.PAGESIZE
_FREE = 2  # buffers that wait for the next batches; more are left over from a jump or an evaluation
_MAPPED = 8  # buffers that a decode process keeps mapped


class CopyEvent(Protocol):
    """Protocol of CUDA's event behind a copy to the device."""

    def query(self) -> bool:
        """Return whether the copy is over."""

    def synchronize(self) -> None:
        """Wait until it is."""


class BatchBuffer:
    """Buffer of a batch: its records' numbers, their labels and their samples.

    Attributes:
        offset: where the buffer begins in the file, in bytes.
        records: int64, shape (n,).
        labels: int64, shape (n,).
        samples: uint8, shape (n, bytes of a sample).
    """

    def __init__(self, memory: mmap.mmap, offset: int, count: int, sample_bytes: int) -> None:
        self.offset = offset
        self.records: Indices = np.frombuffer(memory, np.int64, count)
        self.labels: Indices = np.frombuffer(memory, np.int64, count, 8 * count)
        samples = np.frombuffer(memory, np.uint8, count * sample_bytes, 16 * count)
        self.samples: Pixels = samples.reshape(count, sample_bytes)

    def __len__(self) -> int:
        return len(self.records)


@dataclass(eq=False)
class _Memory:
    """Mapped memory of a buffer."""

    map: mmap.mmap
    offset: int
    size: int
    registered: bool

    @property
    def address(self) -> int:
        return int(np.frombuffer(self.map, np.uint8).ctypes.data)


class Ring:
    """Ring of batch buffers in the process that takes them for batches, and gives them back.

    Args:
        cuda: whether batches go to a GPU; those buffers are pinned.
    """

    def __init__(self, *, cuda: bool) -> None:
        self.descriptor = os.memfd_create("paceline-batches", os.MFD_CLOEXEC)
        self._cuda = cuda
        self._end = 0
        self._free: list[_Memory] = []
        self._used: dict[int, _Memory] = {}  # by offset
        self._uploading: list[tuple[CopyEvent, int]] = []  # with the buffer's offset

    def take(self, count: int, sample_bytes: int, *, pinned: bool) -> BatchBuffer:
        """Take a buffer for `count` samples.

        Args:
            count: number of samples.
            sample_bytes: of a sample, at most.
            pinned: whether they are copied to the device as they are.

        Raises:
            DataError: CUDA can't pin its memory, or release that of free buffers.
            MemoryError: there is no memory for another buffer.
        """
        for event, offset in list(self._uploading):
            if event.query():
                self._uploading.remove((event, offset))
                self._add_free(self._used.pop(offset))
        size = _buffer_bytes(count, sample_bytes)
        registered = pinned and self._cuda
        fitting = [
            memory
            for memory in self._free
            if memory.size >= size and memory.registered == registered
        ]
        if fitting:
            # The smallest that fits leaves the larger ones to larger batches.
            memory = min(fitting, key=lambda each: each.size)
            self._free.remove(memory)
        else:
            self._release_free(keep=0)
            memory = self._new(size, registered=registered)
        self._used[memory.offset] = memory
        return BatchBuffer(memory.map, memory.offset, count, sample_bytes)

    def buffer(self, offset: int, count: int, sample_bytes: int) -> BatchBuffer:
        """Return a buffer that is taken, by its offset, for a thread that fills it."""
        return BatchBuffer(self._used[offset].map, offset, count, sample_bytes)

    def free(self, buffer: BatchBuffer, copied: CopyEvent | None = None) -> None:
        """Give a buffer back.

        Args:
            buffer: one that no process writes to any more.
            copied: the event after which the device has read it; None: nothing reads it.

        Raises:
            DataError: CUDA can't release the memory of buffers that aren't needed any more.
        """
        if copied is None:
            self._add_free(self._used.pop(buffer.offset))
        else:
            self._uploading.append((copied, buffer.offset))

    def close(self) -> None:
        """Give all memory back; no buffer may be used any more."""
        for event, _ in self._uploading:
            event.synchronize()
        self._free += self._used.values()
        self._used.clear()
        self._release_free(keep=0)
        os.close(self.descriptor)

    def _new(self, size: int, *, registered: bool) -> _Memory:
        try:
            # At the file's end, never in place of released
            # memory: a killed process may still have that mapped.
            os.ftruncate(self.descriptor, self._end + size)
            memory = mmap.mmap(self.descriptor, size, offset=self._end)
        except OSError as error:
            raise MemoryError(f"a batch tried to allocate {size} bytes") from error
        made = _Memory(memory, self._end, size, registered)
        if made.registered:
            _check(_cudart().cudaHostRegister(made.address, size, 0), size)
        self._end += size
        return made

    def _add_free(self, memory: _Memory) -> None:
        self._free.append(memory)
        self._release_free(keep=_FREE)

    def _release_free(self, *, keep: int) -> None:
        """Give the memory of free buffers back to the system, but of the newest few."""
        released = self._free[: len(self._free) - keep] if keep else list(self._free)
        for memory in released:
            self._free.remove(memory)
            if memory.registered:
                _check(_cudart().cudaHostUnregister(memory.address), memory.size)
            # Arrays may still refer to the mapping, which ends with the last of them.
            memory.map.madvise(mmap.MADV_REMOVE)


class MappedBuffers:
    """Buffers of a ring, mapped by a decode process, which writes samples to them.

    Args:
        descriptor: the ring's file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._maps: dict[int, mmap.mmap] = {}  # by offset; each holds a descriptor

    def buffer(self, offset: int, count: int, sample_bytes: int) -> BatchBuffer:
        """Return the buffer of `count` samples at an offset."""
        size = _buffer_bytes(count, sample_bytes)
        # Popped and put back: the order of the dictionary is that of the last use.
        memory = self._maps.pop(offset, None)
        if memory is None or len(memory) < size:
            memory = mmap.mmap(self._descriptor, size, offset=offset)
        self._maps[offset] = memory  # last: the first is the one that was used least recently
        if len(self._maps) > _MAPPED:
            del self._maps[next(iter(self._maps))]
        return BatchBuffer(memory, offset, count, sample_bytes)


def _buffer_bytes(count: int, sample_bytes: int) -> int:
    """Return the bytes of a buffer, in whole pages."""
    return -(-count * (16 + sample_bytes) // _PAGE) * _PAGE


def _cudart() -> Any:
    """Return CUDA's runtime; torch is there where a device is."""
    import torch

    return torch.cuda.cudart()


def _check(status: Any, size: int) -> None:
    """Raise what CUDA's runtime reports of so many bytes."""
    if int(status) != 0:
        raise DataError(
            f"CUDA can't pin or release the memory of a batch, {size / 2**20:,.1f} MiB (error "
            f"{int(status)}): raise the limit of locked memory (ulimit -l), or use a smaller "
            "--batch_size."
        )
