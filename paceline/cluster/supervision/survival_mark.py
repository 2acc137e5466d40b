"""Survival mark: a worker declares that its world survives the loss of a process.

The mark is a file in the supervisor's memory. A worker writes it once its run has been formed. From
then on:

    the supervisor is killed    the worker and its wrapper continue
    the wrapper is killed       the worker continues, and the supervisor watches the worker itself
    another worker is lost      the supervisor ends no other worker

Without the mark, each of these ends all workers of the machine.

    ""              not declared
    "<pid>"         the process of that number continues
    "<pid> closed"  it has closed its world, and ends well

The watchdog holds the mark open, and reads it once the supervisor is gone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.supervision.supervisor_file import write_supervisor_file


@dataclass(frozen=True, kw_only=True)
class SurvivalMark:
    """Survival mark of one worker.

    Attributes:
        pid: the worker's process.
        closed: whether it has closed its world.
    """

    pid: int
    closed: bool = False


def declare(path: str, *, closed: bool = False) -> None:
    """Declare that this process's world survives the loss of a process, or is closed.

    Raises:
        OSError: the supervisor has ended.
    """
    write_supervisor_file(path, f"{os.getpid()}{' closed' if closed else ''}")


def read_mark(path: str | Path) -> SurvivalMark | None:
    """Read a worker's mark; None if it declared nothing, or its supervisor has ended."""
    try:
        pid, _, closed = Path(path).read_text().partition(" ")
    except OSError:
        return None
    return SurvivalMark(pid=int(pid), closed=bool(closed)) if pid else None
