"""Events of a machine while it waits: the failure that ended its run, notes for its user."""

from __future__ import annotations

from typing import Protocol

from paceline.cluster.stores.failure_report import FailureReport


class StartEvents(Protocol):
    """Protocol of a machine's events, which end its run or are notes for its user."""

    def put(self, event: FailureReport | str) -> None:
        """Add the failure that ended the run, or a note; from any thread."""

    def pause(self, seconds: float) -> None:
        """Sleep; raise an exception where an event ends the wait."""
