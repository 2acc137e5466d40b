"""Recorder of the leader: what only rank 0 shows or sends, such as the console and the trackers.

Also for another role that a loss hands over: the first rank on a machine without rank 0.

generation    3          4 (member b has become rank 0)
member a      open       lost
member b      closed     open
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from paceline.generation.run import Leadership
from paceline.recorder import NullRecorder, Recorder


class LeaderRecorder(NullRecorder):
    """Recorder on every member that passes events on while this process is the leader.

    Args:
        leadership: says whether this process is the leader of the present generation, or what else
            its recorders are for.
    """

    def __init__(
        self, leadership: Leadership, open_recorders: Callable[[], Sequence[Recorder]]
    ) -> None:
        self._leadership = leadership
        self._open_recorders = open_recorders
        self._recorders: Sequence[Recorder] | None = None
        self._handing_over = threading.Lock()  # events come from any thread
        self._hand_over()

    def event(self, name: str, **fields: Any) -> None:
        """Pass an event on, as the leader."""
        for recorder in self._hand_over():
            recorder.event(name, **fields)

    def _hand_over(self) -> Sequence[Recorder]:
        """Open the recorders if this process has become the leader; close them if it no longer is.

        Returns:
            the open ones.
        """
        with self._handing_over:
            if not self._leadership.leads:
                self.close()
            elif self._recorders is None:
                self._recorders = self._open_recorders()
            return self._recorders or ()

    def close(self) -> None:
        """Close the recorders, also where one fails; its error is raised in the end."""
        recorders = self._recorders
        self._recorders = None
        with ExitStack() as closing:
            for recorder in recorders or ():
                closing.callback(recorder.close)
