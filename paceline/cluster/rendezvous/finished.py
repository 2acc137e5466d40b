"""How a run's machines learn that it is finished: machine 0, where its state is, decides.

    machine 0                                 machine i
    its workers have ended well               its workers have ended well
    mark its run folder
    write `finished` into the store  ──────▶  mark its run folder
    leave                                     leave

So a mark elsewhere means that machine 0 has one. A machine that was killed before its mark comes
back with the same command, and finds `finished` where the run met, or `answer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.cluster.membership.lease_watch import LeaseWatch
from paceline.cluster.rendezvous.registered_machine import RegisteredMachine
from paceline.cluster.rendezvous.registration import RegisteredWorld
from paceline.cluster.stores.store_spec import STORE_ERRORS, peek
from paceline.errors import CommError

FINISHED = "finished"
_PAUSE_S = 0.05


class Finished(Exception):
    """The run came to its end in an earlier start; nothing is left to do."""


def await_finished(
    registered: RegisteredMachine, host: str, pause: Callable[[float], None], limit: float
) -> None:
    """Wait until machine 0 says that the run is finished.

    A meeting place that was lost in mid-run says nothing any more, and ends nobody's run.

    Args:
        registered: another machine's.
        host: machine 0's name.
        pause: sleeps; may raise to end the wait.
        limit: seconds to wait.

    Raises:
        CommError: machine 0 was killed before it could, or says nothing.
    """
    try:
        reason = _silence(registered, pause, limit)
    except STORE_ERRORS:
        if registered.meeting.kind != "tcp":
            return
        reason = "it has gone, and its store with it"
    if reason:
        raise CommError(
            f"machine 0 ({host}) didn't say that the run is finished ({reason}): start the same "
            "command again on all machines."
        )


def _silence(registered: RegisteredMachine, pause: Callable[[float], None], limit: float) -> str:
    """Wait for machine 0's word; return "" once it is there, or why it won't come."""
    leader = RegisteredWorld.from_text(registered.store.get("world")).registrations[0]
    watch = LeaseWatch(registered.store, leader, registered.registration.who)
    deadline = time.monotonic() + limit
    while True:
        verdict = watch.verdict()
        if peek(registered.store, FINISHED) is not None:
            return ""
        if verdict.state == "dead" or time.monotonic() > deadline:
            return verdict.reason
        pause(_PAUSE_S)
