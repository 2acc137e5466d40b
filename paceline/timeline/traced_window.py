"""Tracing wrapper: measures a window's puts and waits, each by a span in the calling thread."""

from __future__ import annotations

from paceline.comm.window import Source, Window, WindowWrapper, bytes_of
from paceline.timeline.timeline import Timeline


class TracedWindow(WindowWrapper):
    """Tracing wrapper around a window: records a span for each put and wait.

    Args:
        window: the window to wrap.
        number: the number of this window among the process's windows, as spans record it.
        timeline: receives spans `put` and `wait for rank` (with peer, notification and value), and
            spans `flush` and `wait for notification`.
    """

    def __init__(self, window: Window, number: int, timeline: Timeline) -> None:
        super().__init__(window)
        self.close = window.close
        self._number = number
        self._timeline = timeline

    def put(
        self,
        peer: int,
        offset: int,
        source: Source,
        notification: int,
        value: int,
        priority: int = 0,
    ) -> None:
        """Start a put."""
        size = sum(part.numel() for part in bytes_of(source))
        fields = {"peer": peer, "notification": notification, "value": value, "bytes": size}
        with self._timeline.span("put", window=self._number, priority=priority, **fields):
            self._window.put(peer, offset, source, notification, value, priority)

    def wait(
        self, peer: int, notification: int, value: int, *, limit: float, operation: str
    ) -> None:
        """Wait for a notification."""
        fields = {"peer": peer, "notification": notification, "value": value}
        with self._timeline.span("wait for rank", window=self._number, **fields):
            self._window.wait(peer, notification, value, limit=limit, operation=operation)

    def wait_for_event(self, seen: int, limit: float) -> int:
        """Wait for any notification."""
        with self._timeline.span("wait for notification"):
            return self._window.wait_for_event(seen, limit)

    def flush(self, peer: int, *, limit: float, operation: str) -> None:
        """Wait until puts have been sent."""
        with self._timeline.span("flush", peer=peer):
            self._window.flush(peer, limit=limit, operation=operation)
