"""One recorder for several: each is told everything, in the order in which they were given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from paceline.recorder import Recorder


class Fanout:
    """Pass everything on to `recorders`, which it closes."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders = recorders

    @contextmanager
    def span(self, name: str, **fields: object) -> Iterator[None]:
        """Measure the block in each of them."""
        with ExitStack() as spans:
            for recorder in self._recorders:
                spans.enter_context(recorder.span(name, **fields))
            yield

    def count(self, name: str, amount: float) -> None:
        """Count in each of them."""
        for recorder in self._recorders:
            recorder.count(name, amount)

    def event(self, name: str, **fields: object) -> None:
        """Tell each of them."""
        for recorder in self._recorders:
            recorder.event(name, **fields)

    def close(self) -> None:
        """Close all of them, also where one fails; its error is raised in the end."""
        with ExitStack() as closing:
            for recorder in reversed(self._recorders):
                closing.callback(recorder.close)
