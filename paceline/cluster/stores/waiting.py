"""Waiting for what other processes write into the store, as long as none of them has failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from torch._C._distributed_c10d import Store

from paceline.cluster.stores.store_spec import STORE_ERRORS, peek
from paceline.cluster.supervision.failure_report import FAILURE, FailureReport
from paceline.errors import CommTimeout, PeerLost

_T = TypeVar("_T")


def await_keys(
    store: Store, keys: Sequence[str], timeout: float, late: Callable[[list[str]], str]
) -> None:
    """Wait until all keys are there.

    Args:
        store: the run's store.
        keys: what to wait for.
        timeout: seconds to wait.
        late: makes the sentence of a wait that was too long, of the keys that are missing.

    Raises:
        CommTimeout: some didn't come in time.
        PeerLost: another process gave a reason for the run's end.
    """
    deadline = time.monotonic() + timeout
    pause = 0.002
    missing = list(keys)
    while missing := [key for key in missing if not store.check([key])]:
        text = peek(store, FAILURE)
        if text is not None:
            raise PeerLost(f"the run has ended: {FailureReport.from_text(text).text}")
        if time.monotonic() > deadline:
            raise CommTimeout(late(missing))
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)


def within(limit: float, work: Callable[[], _T]) -> _T | None:
    """Return what `work` returns, or None if the store fails it or keeps it waiting too long.

    An error is not reported: the heartbeat has warned that the store is lost.
    """
    results: list[_T] = []

    def do() -> None:
        with suppress(*STORE_ERRORS):
            results.append(work())

    thread = threading.Thread(target=do, name="store", daemon=True)
    thread.start()
    thread.join(limit)
    return results[0] if results else None
