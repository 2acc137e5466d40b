"""One reader's observations of one lease, which `judge` judges."""

from __future__ import annotations

import time

from torch._C._distributed_c10d import Store

from paceline.cluster.membership.lease import LeaseOptions, Observation, Verdict, judge
from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.rendezvous.registration import Registration
from paceline.cluster.stores.store_spec import peek


class LeaseWatch:
    """Watch on the lease of one registered machine.

    Args:
        store: the start's.
        registration: the registration whose lease is watched.
        here: this process.
        options: when a lease counts as dead.
    """

    def __init__(
        self,
        store: Store,
        registration: Registration,
        here: ProcessIdentity,
        options: LeaseOptions | None = None,
    ) -> None:
        self.registration = registration
        self._store = store
        self._here = here
        self._options = options or LeaseOptions()
        counter = peek(store, self._key)
        self._seen = Observation.first(registration.process, here, counter, time.monotonic())

    def verdict(self) -> Verdict:
        """Look at the lease, and judge by all observations until now."""
        counter = peek(self._store, self._key)
        now = time.monotonic()
        self._seen = self._seen.then(self.registration.process, self._here, counter, now)
        return judge(self._seen, now, self._options)

    @property
    def _key(self) -> str:
        return lease_key(self.registration)


def lease_key(registration: Registration) -> str:
    """Return the key of a registration's lease."""
    return f"lease/{registration.id}"
