"""Waiting for what other processes write into the store, as long as none of them has failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from torch._C._distributed_c10d import Store

from paceline.cluster.stores.failure_report import FAILURE, FailureReport
from paceline.cluster.stores.store_spec import STORE_ERRORS, peek
from paceline.comm.peer_activities import NO_PEERS, PeerActivities, WaitLimit
from paceline.errors import CommTimeout, PeerLost

_T = TypeVar("_T")


def await_keys(
    store: Store,
    keys: Sequence[str],
    timeout: float,
    make_timeout_message: Callable[[list[str]], str],
    activities: PeerActivities = NO_PEERS,
) -> None:
    """Wait until all keys are there.

    Args:
        store: the run's store.
        keys: what to wait for.
        timeout: seconds to wait.
        make_timeout_message: makes the error's text from the keys that are missing.
        activities: what the other processes do; it names what they do instead.

    Raises:
        CommTimeout: some didn't come in time.
        PeerLost: another process gave a reason for the run's end.
        ConfigError, IdleTimeout: as `PeerActivities.look`.
    """
    pause = 0.002
    missing = list(keys)
    with WaitLimit(timeout, activities, "a call that all ranks make") as limit:
        while missing := [key for key in missing if not store.check([key])]:
            # A process that has failed won't write its key: waiting for it would hide the reason.
            text = peek(store, FAILURE)
            if text is not None:
                raise PeerLost(f"the run has ended: {FailureReport.from_text(text).text}")
            if limit.look():
                raise CommTimeout(make_timeout_message(missing))
            time.sleep(pause)
            pause = min(1.5 * pause, 0.1)


def call_with_timeout(timeout: float, call: Callable[[], _T]) -> _T | None:
    """Call in a thread; return the result, or None after an error of the store or the timeout.

    An error is not reported: the heartbeat has warned that the store is lost.
    """
    results: list[_T] = []

    def run() -> None:
        with suppress(*STORE_ERRORS):
            results.append(call())

    # A call into a folder whose server is gone can't be interrupted: the thread is left behind.
    thread = threading.Thread(target=run, name="store", daemon=True)
    thread.start()
    thread.join(timeout)
    return results[0] if results else None
