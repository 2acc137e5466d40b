"""Control lines of several members in one process, and a handler that records what happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from paceline.cluster.membership.control_line.line import ControlLine

HERE, SECRET, LIMIT = "127.0.0.1", b"s" * 32, 20.0
BEAT = 0.05


class Recorder:
    """Handler that records events and frames, for which other threads wait."""

    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []
        self.frames: list[tuple[str, str, dict[str, Any], bytes | bytearray]] = []
        self._changed = threading.Condition()

    def received(self, peer: str, kind: str, body: dict[str, Any], bulk: bytes | bytearray) -> None:
        with self._changed:
            self.frames.append((peer, kind, body, bulk))
            self._changed.notify_all()

    def opened(self, peer: str) -> None:
        with self._changed:
            self.events.append(("opened", peer))
            self._changed.notify_all()

    def closed(self, peer: str, reason: str) -> None:
        with self._changed:
            self.events.append(("closed", peer, reason))
            self._changed.notify_all()

    def wait(self, ready: Callable[[Recorder], bool]) -> None:
        """Wait until a condition holds; after each event or frame it is evaluated."""
        with self._changed:
            assert self._changed.wait_for(lambda: ready(self), LIMIT), (self.events, self.frames)


def line_of(name: str, handler: Any = None, **options: Any) -> ControlLine:
    """Return a line on the loopback address."""
    options = {"secret": SECRET, "beat_seconds": BEAT, **options}
    return ControlLine(name=name, address=HERE, handler=handler or Recorder(), **options)


def connect(lines: Sequence[ControlLine]) -> None:
    """Connect all with each other."""
    for line in lines:
        for other in lines:
            line.expect(other.name, HERE, other.port)
    for line in lines:
        assert not line.wait_connected([other.name for other in lines], LIMIT)


@contextmanager
def connected_lines(
    count: int, **options: Any
) -> Iterator[tuple[list[ControlLine], list[Recorder]]]:
    """Make members a, b, … inside the block, connected with each other."""
    recorders = [Recorder() for _ in range(count)]
    with ExitStack() as stack:
        lines = []
        for name, recorder in zip("abcdefgh", recorders, strict=False):
            lines.append(line_of(name, recorder, **options))
            stack.callback(lines[-1].close)
        connect(lines)
        yield lines, recorders
