"""Machine 0's answer to machines that come back to a run which is finished.

They wait for machine 0, whose store may have gone with it. Started again it finds its run folder
marked, and says so for a few seconds in an incarnation of the run that never trains.
"""

from __future__ import annotations

import time
from contextlib import suppress

from paceline.cluster.rendezvous.deadline import Deadline
from paceline.cluster.rendezvous.finished import FINISHED
from paceline.cluster.rendezvous.leader import take_over
from paceline.cluster.rendezvous.machine_rendezvous import host, registration_of
from paceline.cluster.rendezvous.reachability import ProbeListener
from paceline.cluster.rendezvous.registered_machine import STORE_LIMIT, RegisteredMachine
from paceline.cluster.rendezvous.registration import RunRecord
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.store_spec import STORE_ERRORS, StoreSpec, open_store, peek


def answer(plan: RunPlan, limit: float = 5.0) -> None:
    """Tell the machines that come within the limit that the run is over.

    Nothing is lost if the meeting place fails: they wait, as for any machine.

    Args:
        plan: machine 0's part in the run.
        limit: seconds to wait for machines to come.
    """
    deadline = Deadline(limit, _say_nothing, time.sleep, "")
    with suppress(*STORE_ERRORS), ProbeListener() as listener:
        server, meeting = host(plan)
        if server is None and _is_told(meeting):
            return
        registration = registration_of(plan, listener)
        name = take_over(plan, meeting, registration, deadline)
        registered = RegisteredMachine(
            plan, meeting, name, registration, notice=_say_nothing, warn=_say_nothing
        )
        try:
            registered.store.set(FINISHED, "1")
            registered.store.set(registered.key("left"), "1")
            while not registered.others_left():
                deadline.wait("the other machines")
        finally:
            registered.abandon()


def _is_told(meeting: StoreSpec) -> bool:
    """Tell whether the run's last start left its word for a machine that was killed."""
    text = peek(open_store(meeting, STORE_LIMIT, make=True), "run")
    if text is None:
        return False
    space = meeting.within(RunRecord.from_text(text).generation)
    return peek(open_store(space, STORE_LIMIT), FINISHED) is not None


def _say_nothing(word: object) -> None:
    """Tell nobody: the run is finished."""
