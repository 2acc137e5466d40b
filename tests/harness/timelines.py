"""A timeline whose time passes when a test says so."""

from __future__ import annotations

from paceline.timeline.timeline import Timeline


class GivenTime(Timeline):
    """Timeline with a clock of its own, which starts at 0."""

    def __init__(self) -> None:
        self.nanoseconds = 0
        super().__init__(lambda: self.nanoseconds)

    def passes(self, seconds: float) -> None:
        """Let time pass."""
        self.nanoseconds += round(seconds * 1e9)

    def spend(self, seconds: float, name: str, **fields: object) -> None:
        """Let time pass in a span."""
        with self.span(name, **fields):
            self.passes(seconds)
