"""Thread that renews a lease while the supervisor waits for other things."""

from __future__ import annotations

import threading
from typing import Protocol

from paceline.cluster.membership.leases.lease import BEAT_S
from paceline.cluster.stores.store_spec import STORE_ERRORS

_CLOSE_S = 2.0


class RenewedLease(Protocol):
    """Protocol of a lease that a heartbeat renews."""

    def beat(self, count: int) -> None:
        """Advance the lease to a number."""

    def beat_failed(self, error: Exception) -> None:
        """Handle the first of several consecutive failures, in the heartbeat's thread."""


class Heartbeat:
    """Heartbeat thread: calls `beat(1)`, `beat(2)`, … every half second until it is closed.

    A failed call is repeated: the loss of the store doesn't end the run.

    Args:
        lease: what is renewed. The constructor makes the first call itself, in the caller's thread.
    """

    def __init__(self, lease: RenewedLease) -> None:
        self._lease = lease
        self._end = threading.Event()
        lease.beat(1)
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
                self._lease.beat(count)
                failing = False
            except STORE_ERRORS as error:
                if not failing:
                    self._lease.beat_failed(error)
                failing = True
