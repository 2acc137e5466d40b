"""The `Recorder` protocol of measurements (spans, counts, events), and its null.

The steps of a run report to a recorder what happens; where that goes (a log, a file, a terminal) is
`paceline.observe`'s matter. The null recorder is the default, and measuring changes no code path.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

_NOTHING = nullcontext()


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
