"""Cgroups (v1 or v2) whose members have so much memory, and no swap; they need root."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
_LIMITS = ("memory.limit_in_bytes", "memory.max")  # of v1, and of v2
_SWAP = (("memory.swappiness", "0"), ("memory.swap.max", "0"))
_PEAKS = ("memory.max_usage_in_bytes", "memory.peak")


@dataclass(frozen=True)
class MemoryGroup:
    """Cgroup with a limit of memory. What a process had before it joined doesn't count."""

    folder: Path

    def join(self) -> None:
        """Move this process into the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak(self) -> int:
        """The most bytes that its members have had at once."""
        return int(self._file(_PEAKS).read_text())

    def limit(self, size: int) -> None:
        """Kill members that would have more than so many bytes."""
        self._file(_LIMITS).write_text(str(size))
        for name, value in _SWAP:
            with suppress(OSError):
                (self.folder / name).write_text(value)

    def _file(self, names: tuple[str, ...]) -> Path:
        found = [self.folder / name for name in names if (self.folder / name).exists()]
        if not found:
            raise OSError(f"{self.folder} has none of {', '.join(names)}")
        return found[0]


@contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup]:
    """Make a group, and remove it in the end; skip the test where none can be made."""
    root = next((one for one in _ROOTS if (one / "cgroup.procs").exists()), _ROOTS[-1])
    group = MemoryGroup(root / f"paceline-{os.getpid()}-{name}")
    try:
        group.folder.mkdir()
        assert group.peak >= 0
    except OSError as error:
        with suppress(OSError):
            group.folder.rmdir()
        pytest.skip(f"no cgroup with a limit of memory can be made here: {error}")
    try:
        yield group
    finally:
        for _ in range(50):  # its last members end at any moment
            with suppress(OSError):
                group.folder.rmdir()
                break
            time.sleep(0.1)
