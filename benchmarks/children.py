"""The processes that a benchmark has started, which end with it.

    benchmark ── paceline launch ── worker ── decode processes
                                  └ worker ── …

Workers have sessions of their own, and outlive a launcher that is killed. So a benchmark adopts
orphans among its descendants, and ends all of them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end, so that these are found."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def kill_descendants() -> None:
    """Kill all that this process has started, after `adopt_orphans`, and wait for their ends."""
    with suppress(ChildProcessError):  # none is left
        while True:
            _kill(_descendants(os.getpid()))
            os.wait()


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a program and all that it has started; wait for its end."""
    process.send_signal(signal.SIGSTOP)  # it starts nothing while its descendants are looked for
    _kill(_descendants(process.pid))
    process.kill()
    process.wait()


def _kill(processes: set[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _descendants(root: int) -> set[int]:
    """Return the ids of a process's descendants; see proc(5), /proc/[pid]/stat."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    found = {root}
    size = 0
    while size < len(found):
        size = len(found)
        found |= {process for process, parent in parents.items() if parent in found}
    return found - {root}
