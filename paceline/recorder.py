"""Recorders of events: their protocol, one that ignores all, several as one, one of a member.

The steps of a run report to a recorder what happens; where that goes (a log, a file, a terminal) is
`paceline.observe`'s matter. The null recorder is the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Protocol

_RESULTS = ("step", "loss", "epoch", "speeds", "merge", "replay")


def is_result(name: str, fields: Mapping[str, object]) -> bool:
    """Return whether only a member of the world may record an event.

    These are the results of steps, and checkpoints that the steps report: not the last one of a
    process that has lost the others.
    """
    return name in _RESULTS or (name == "checkpoint" and bool(fields.get("in_step")))


class Recorder(Protocol):
    """Protocol of what receives a run's events."""

    def event(self, name: str, **fields: object) -> None:
        """Record that something happened, with what is known about it."""

    def close(self) -> None:
        """Write out what is left and release files."""


class NullRecorder:
    """Recorder that ignores everything."""

    def event(self, name: str, **fields: object) -> None:
        """Ignore an event."""

    def close(self) -> None:
        """Release nothing."""


class Recorders:
    """Several recorders as one.

    Args:
        recorders: get each event in this order.
    """

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders = recorders

    def event(self, name: str, **fields: object) -> None:
        """Pass an event on to all."""
        for recorder in self._recorders:
            recorder.event(name, **fields)

    def close(self) -> None:
        """Close all, also where one fails; its error is raised in the end."""
        with ExitStack() as closing:
            for recorder in reversed(self._recorders):
                closing.callback(recorder.close)


class Admission(Protocol):
    """Protocol of what says whether this process is in the world."""

    def require_member(self) -> None:
        """Return if it is; raise an error otherwise."""


class MemberRecorder:
    """Recorder of a member whose world survives losses: results pass it after a check.

    The others may have expelled a process that was stopped for a while; its files and its console
    may be on a machine that it shares with them.

    Args:
        membership: raises an error where this process may be outside the world.
    """

    def __init__(self, recorder: Recorder, membership: Admission) -> None:
        self._recorder = recorder
        self._membership = membership

    def event(self, name: str, **fields: object) -> None:
        """Pass an event on."""
        if is_result(name, fields):
            self._membership.require_member()
        self._recorder.event(name, **fields)

    def close(self) -> None:
        """Close the recorders."""
        self._recorder.close()
