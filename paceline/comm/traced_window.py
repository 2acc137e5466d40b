"""A window whose puts and waits are measured, each by a span in the thread that calls."""

from __future__ import annotations

from torch import Tensor

from paceline.comm.window import Source, Window, tensors_of
from paceline.recorder import Recorder


class TracedWindow:
    """Passes everything on to a window.

    Args:
        window: any.
        number: which of this process's windows it is, in the spans.
        recorder: gets spans `put` and `wait for rank` with peer, notification and value, and
            `wait for events`.
    """

    def __init__(self, window: Window, number: int, recorder: Recorder) -> None:
        self._window, self._number, self._recorder = window, number, recorder
        self.rank, self.world_size = window.rank, window.world_size
        self.memory, self.values = window.memory, window.values

    def peer_memory(self, peer: int) -> Tensor | None:
        """Return a peer's memory where it is shared."""
        return self._window.peer_memory(peer)

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
        size = sum(part.nbytes for part in tensors_of(source))
        told = {"peer": peer, "notification": notification, "value": value, "bytes": size}
        with self._recorder.span("put", window=self._number, priority=priority, **told):
            self._window.put(peer, offset, source, notification, value, priority)

    def wait(
        self, peer: int, notification: int, value: int, *, limit: float, operation: str
    ) -> None:
        """Wait for a notification."""
        told = {"peer": peer, "notification": notification, "value": value}
        with self._recorder.span("wait for rank", window=self._number, **told):
            self._window.wait(peer, notification, value, limit=limit, operation=operation)

    def subscribe(self, below: int) -> None:
        """Count only some notifications as news."""
        self._window.subscribe(below)

    def wake(self) -> None:
        """Wake who waits for news."""
        self._window.wake()

    def wait_for_event(self, seen: int, limit: float) -> int:
        """Wait for news."""
        with self._recorder.span("wait for news"):
            return self._window.wait_for_event(seen, limit)

    def flush(self, peer: int, *, limit: float, operation: str) -> None:
        """Wait until puts have left."""
        with self._recorder.span("flush", peer=peer):
            self._window.flush(peer, limit=limit, operation=operation)

    def close(self) -> None:
        """Close the window."""
        self._window.close()
