"""Whether a machine's lease has expired, as one reader of the store sees it."""

from __future__ import annotations

import time

from torch._C._distributed_c10d import Store

from paceline.cluster.membership.leases.lease import Verdict, judge
from paceline.cluster.membership.process_identity import ProcessIdentity, ask_kernel
from paceline.cluster.rendezvous.registration import Registration
from paceline.cluster.stores.store_spec import peek


class LeaseWatch:
    """Watch on the lease of one registered machine.

    Args:
        store: the store of this start (one launch attempt) of the run.
        registration: the registration whose lease is watched.
        own_process: the identity of this process.
    """

    def __init__(
        self, store: Store, registration: Registration, own_process: ProcessIdentity
    ) -> None:
        self.registration = registration
        self._store = store
        self._own_process = own_process
        self._counter = peek(store, lease_key(registration))
        self._since = time.monotonic()
        self._advanced = False

    def verdict(self) -> Verdict:
        """Look at the lease, and judge by all that was seen until now."""
        counter = peek(self._store, lease_key(self.registration))
        now = time.monotonic()
        if counter != self._counter:
            self._counter = counter
            self._since = now
            self._advanced = True
        process = ask_kernel(self.registration.process, self._own_process)
        return judge(counter, process, now - self._since, advanced=self._advanced)


def lease_key(registration: Registration) -> str:
    """Return the key of a registration's lease."""
    return f"lease/{registration.id}"
