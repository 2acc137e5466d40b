"""The `Recorder` protocol of measurements (spans, counts, events), its null, and a checked one.

The steps of a run report to a recorder what happens; where that goes (a log, a file, a terminal) is
`paceline.observe`'s matter. The null recorder is the default, and measuring changes no code path.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

_NOTHING = nullcontext()
_RESULTS = ("step", "loss", "epoch", "speeds", "merge", "replay")


def is_result(name: str, fields: Mapping[str, object]) -> bool:
    """Return whether only a member of the world may record an event.

    These are the results of steps, and checkpoints that the steps report: not the last one of a
    process that has lost the others.
    """
    return name in _RESULTS or (name == "checkpoint" and bool(fields.get("in_step")))


class Recorder(Protocol):
    """Receiver of a run's spans, counts and events."""

    def span(self, name: str, **fields: object) -> AbstractContextManager[None]:
        """Measure the time spent inside a `with` block under `name`, with what it was spent on."""

    def count(self, name: str, amount: float) -> None:
        """Add `amount` to the counter `name`."""

    def event(self, name: str, **fields: object) -> None:
        """Tell that something happened, once, with what there is to know about it."""

    def close(self) -> None:
        """Write out what is left and release files."""


class NullRecorder:
    """Recorder that ignores everything."""

    def span(self, name: str, **fields: object) -> AbstractContextManager[None]:
        """Do nothing around the block."""
        return _NOTHING

    def count(self, name: str, amount: float) -> None:
        """Ignore a count."""

    def event(self, name: str, **fields: object) -> None:
        """Ignore an event."""

    def close(self) -> None:
        """Release nothing."""


class Admission(Protocol):
    """Protocol of what says whether this process is in the world."""

    def require_member(self) -> None:
        """Return if it is; raise an error otherwise."""


class MemberRecorder:
    """Recorder of a member whose world survives losses: results pass it after a check.

    The others may have expelled a process that was stopped for a while; its files and its console
    may be on a machine that it shares with them.

    Args:
        recorder: the member's recorders.
        membership: raises an error where this process may be outside the world.
    """

    def __init__(self, recorder: Recorder, membership: Admission) -> None:
        self._recorder = recorder
        self._membership = membership

    def span(self, name: str, **fields: object) -> AbstractContextManager[None]:
        """Pass a span on."""
        return self._recorder.span(name, **fields)

    def count(self, name: str, amount: float) -> None:
        """Pass a count on."""
        self._recorder.count(name, amount)

    def event(self, name: str, **fields: object) -> None:
        """Pass an event on."""
        if is_result(name, fields):
            self._membership.require_member()
        self._recorder.event(name, **fields)

    def close(self) -> None:
        """Close the recorders."""
        self._recorder.close()
