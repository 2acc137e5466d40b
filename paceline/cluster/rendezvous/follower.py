"""The other machines' part of a rendezvous: find the live start, register, wait for the world.

The newest start may be a dead run's, so it counts only while machine 0's lease advances. A machine
that finds a world complete without it, or loses machine 0 before that, goes back to waiting for the
run's next start.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from paceline.cluster.rendezvous.deadline import (
    Deadline,
    DeadlinePassed,
    describe_numbers,
    missing_numbers,
)
from paceline.cluster.rendezvous.lease_watch import LeaseWatch
from paceline.cluster.rendezvous.registered_machine import (
    FINISHED,
    STORE_LIMIT,
    Finished,
    RegisteredMachine,
)
from paceline.cluster.rendezvous.registration import RegisteredWorld, Registration, RunRecord
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.rendezvous.start_events import StartEvents
from paceline.cluster.stores.failure_report import FailureReport, post
from paceline.cluster.stores.store_spec import STORE_ERRORS, StoreSpec, first_line, open_store, peek
from paceline.errors import CommError, ConfigError


def follow(
    plan: RunPlan,
    registration: Registration,
    deadline: Deadline,
    events: StartEvents,
) -> tuple[RegisteredMachine, RegisteredWorld]:
    """Register this machine in the run's live start.

    Args:
        plan: this machine's part.
        registration: its entry.
        deadline: the limit.
        events: see `RegisteredMachine`.

    Returns:
        the registered machine, and the complete world with it.

    Raises:
        ConfigError: the machines disagree on their number, or this machine's number is taken.
        DeadlinePassed: a machine didn't come; names it.
        Finished: this machine was in the run before, and it is over.
    """
    rendezvous = plan.rendezvous
    assert rendezvous is not None

    def register(live: _Live) -> RegisteredMachine:
        start_id = live.record.generation
        return RegisteredMachine(plan, rendezvous, start_id, registration, events)

    if not rendezvous.served_by_run:  # machine 0 serves that one, and may be yet to start
        open_store(rendezvous, STORE_LIMIT)
    while True:
        reason = ""
        try:
            live = _live_start(rendezvous, registration, plan, deadline)
            if _finished(live, plan):
                with suppress(*STORE_ERRORS):  # another machine has removed the start
                    register(live).deregister()
                raise Finished
            text = peek(live.store, "world")
            if live.record.machines != plan.machines:
                mistake = ConfigError(
                    f"--num_shards {plan.machines} on machine {plan.machine}, but "
                    f"{live.record.machines} on machine 0 ({live.record.leader.process.host}): "
                    "give the same number on all machines."
                )
                # The others wait for a machine that never
                # registers: the report ends their wait, too.
                if text is None:  # no world can form
                    post(live.store, FailureReport.of(mistake))
                raise mistake
            if text is not None:  # the run trains already; its machine of this number may be dead
                holder = RegisteredWorld.from_text(text).registrations[plan.machine]
                watch = LeaseWatch(live.store, holder, registration.process)
                _refuse_live_holder(watch, plan, deadline)
            elif (joined := _register_and_wait(live, register(live), deadline)) is not None:
                return joined
        except DeadlinePassed:
            raise
        # A start that ends before its world is complete is no error here: the next one may come.
        except (CommError, DistError) as error:  # machine 0 went, and took the store with it
            reason = f" ({first_line(error)})"
        deadline.check_and_pause(describe_numbers("machine", [0], plan.machines) + reason)


@dataclass(frozen=True, kw_only=True)
class _Live:
    """Live start: a start whose machine 0 is alive or has finished the run."""

    text: bytes
    record: RunRecord
    store: Store
    leader: LeaseWatch


def _live_start(
    rendezvous: StoreSpec, registration: Registration, plan: RunPlan, deadline: Deadline
) -> _Live:
    """Wait for a start that is alive or finished."""
    store = open_store(rendezvous, STORE_LIMIT)
    live: _Live | None = None
    while True:
        text = peek(store, "run")
        if text is not None and (live is None or text != live.text):
            record = RunRecord.from_text(text)
            inside = open_store(rendezvous.subspace(record.generation), STORE_LIMIT)
            leader = LeaseWatch(inside, record.leader, registration.process)
            live = _Live(text=text, record=record, store=inside, leader=leader)
        if (
            text is not None
            and live is not None
            and (_finished(live, plan) or live.leader.verdict().state == "alive")
        ):
            return live
        deadline.check_and_pause(describe_numbers("machine", [0], plan.machines))


def _finished(live: _Live, plan: RunPlan) -> bool:
    """Return whether the run is over; for a machine that never trained in it, it isn't."""
    return plan.begun and peek(live.store, FINISHED) is not None


def _register_and_wait(
    live: _Live, registered: RegisteredMachine, deadline: Deadline
) -> tuple[RegisteredMachine, RegisteredWorld] | None:
    """Return the complete world; None if it will not form, or not with this machine."""
    key = registered.key("machine")
    own = registered.registration.to_text()
    with ExitStack() as undo:
        undo.callback(registered.abandon)
        while (holder := registered.store.compare_set(key, "", own)) != own.encode():
            watch = registered.watch(Registration.from_text(holder))
            _refuse_live_holder(watch, registered.plan, deadline)
            # Only if it is still the dead one's: of two
            # machines that come at once, one gets the number.
            registered.store.compare_set(key, holder.decode(), own)
        world = _await_world(registered, live, deadline)
        if world is None:
            return None
        undo.pop_all()
    return registered, world


def _refuse_live_holder(holder: LeaseWatch, plan: RunPlan, deadline: Deadline) -> None:
    """Wait until the holder of this machine's number is known to be dead.

    Raises:
        ConfigError: it is alive.
    """
    host = holder.registration.process.host
    while (verdict := holder.verdict()).state == "unknown":
        deadline.check_and_pause(f"a heartbeat of machine {plan.machine} ({host})")
    if verdict.state == "alive":
        raise ConfigError(
            f"--shard_id {plan.machine} of run {plan.run_id!r} is taken by a live machine, host "
            f"{host} ({verdict.reason}): give each machine its own number."
        )


def _await_world(
    registered: RegisteredMachine, live: _Live, deadline: Deadline
) -> RegisteredWorld | None:
    while True:
        text = peek(registered.store, "world")
        if text is not None:
            world = RegisteredWorld.from_text(text)
            # Another machine may have taken this number while this one seemed dead.
            return world if registered.registration in world.registrations else None
        if (
            peek(registered.run_store, "run") != live.text
            or _finished(live, registered.plan)  # marked since this machine registered
            or live.leader.verdict().state == "dead"
        ):
            return None
        missing = missing_numbers(registered.store, "machine", registered.plan.machines) or [0]
        deadline.check_and_pause(describe_numbers("machine", missing, registered.plan.machines))
