"""Servers of a window group, which are threads and start when the first rank invites them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.reduce.put_engine.layout import Layout


class InvitedThreads:
    """Servers of a window group.

    Args:
        count: how many there are.
        start: starts them, unless they have been.
    """

    address = "127.0.0.1"

    def __init__(self, count: int, start: Callable[[Layout], object]) -> None:
        self.count = count
        self._start = start

    def invite(self, layout: Layout) -> None:
        self._start(layout)

    def publish(self, addresses: Sequence[str]) -> None:
        raise AssertionError("threads need no addresses")
