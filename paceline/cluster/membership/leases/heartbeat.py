"""Thread that renews a lease while the supervisor waits for other things."""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.cluster.membership.leases.lease import BEAT_S
from paceline.cluster.stores.store_spec import STORE_ERRORS

_CLOSE_S = 2.0


class Heartbeat:
    """Heartbeat thread: calls `beat(1)`, `beat(2)`, … every half second until it is closed.

    A failed call is repeated: the loss of the store doesn't end the run. Of several consecutive
    failures, only the first is reported.

    Args:
        beat: advances the lease to the given number. The constructor makes the first call itself,
            in the caller's thread.
        report: called with a failure, in the heartbeat's thread.
    """

    def __init__(self, beat: Callable[[int], None], report: Callable[[Exception], None]) -> None:
        self._beat = beat
        self._report = report
        self._end = threading.Event()
        beat(1)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; a beat that hangs in a dead folder is left behind."""
        self._end.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        count = 1
        failing = False
        while not self._end.wait(BEAT_S):
            count += 1
            try:
                self._beat(count)
                failing = False
            except STORE_ERRORS as error:
                if not failing:
                    self._report(error)
                failing = True
