"""The open world of this process: there is at most one, from `paceline.join()` to its end.

A module-level variable holds it, because the process has it: its signal handlers, its exit hooks
and the lock of the run folder, which the system grants to a process. `sys.excepthook` can't show
that a world is open: IPython resets it after each cell.

    a script             a second `join` is an error
    a notebook, a REPL   a second `join` closes the earlier world, so that a cell can run twice
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from paceline.errors import ConfigError


class OpenWorld(Protocol):
    """Protocol of the open world, as far as what ends it needs it."""

    @property
    def folder(self) -> Path | None:
        """The run's folder."""

    @property
    def in_step(self) -> bool:
        """Whether a step is active."""

    def close(self) -> None:
        """Close the world."""

    def rescue(self, error: BaseException | None = None) -> str:
        """Write the newest in-memory snapshot to disk; return a sentence for the user, or ""."""

    def close_for_next(self) -> None:
        """Close the world, because a cell joins again; print what is saved."""


_open: OpenWorld | None = None


def open_world() -> OpenWorld | None:
    """Return the world that is open in this process, as far as it can be ended."""
    return _open


def set_open_world(world: OpenWorld | None) -> None:
    """Record the world that is open in this process, or that none is."""
    global _open
    _open = world


def end_earlier_world(call: str, *, interactive: bool) -> None:
    """Close the world that is open in this process, whose state is saved, before another begins.

    Args:
        call: what needs it to be closed.
        interactive: whether a user types statements or runs cells here.

    Raises:
        ConfigError: a world is open, and no user runs cells, or it makes a step at this moment.
        CheckpointError: its last checkpoint can't be written. It is closed nevertheless.
    """
    if _open is None:
        return
    if not interactive or _open.in_step:
        raise ConfigError(
            f"{call} was called, but paceline.join() was already called and its world is still "
            "open: call join() once and pass the world around, or close() it first."
        )
    _open.close_for_next()
