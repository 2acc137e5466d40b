"""Processor time of a process and all that it started, by proc(5)."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")  # of the times in /proc/<pid>/stat, per second
# Fields of it after the name, counted from 0:
_PARENT = 1
_FIRST = 11
_LAST = 15
_STARTED = 19


def processor_seconds(root: int) -> float:
    """Return the processor time of a process, its living descendants, and those waited for.

    That of a process which ended without being waited for, such as an orphan, is missing.

    Args:
        root: the process's number; 0.0 where there is no such process.
    """
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (fields := _stat(int(folder.name))):
            children.setdefault(int(fields[_PARENT]), []).append(int(folder.name))
            seconds[int(folder.name)] = sum(map(int, fields[_FIRST:_LAST])) / _TICK
    found = 0.0
    waiting = [root]
    while waiting:
        process = waiting.pop()
        found += seconds.get(process, 0.0)
        waiting += children.get(process, [])
    return found


def running_seconds(process: int) -> float:
    """Return the time since a process was started; 0.0 where there is no such process."""
    fields = _stat(process)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return now - int(fields[_STARTED]) / _TICK if fields else 0.0


def _stat(process: int) -> list[str]:
    """Return the fields of a process after its name, which may have blanks; [] if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()
