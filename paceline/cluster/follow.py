"""The other machines' part of a rendezvous: find the live incarnation, claim a place, wait.

The newest incarnation may be a dead run's, so it counts only while machine 0's lease advances. A
machine that finds a world sealed without it, or loses machine 0 before the seal, goes back to
waiting: the next start of the run is a new incarnation.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import DistError

from paceline.cluster.failure import Failure
from paceline.cluster.lease_watch import LeaseWatch
from paceline.cluster.patience import Patience, TooLate, name_machines
from paceline.cluster.plan import RunPlan
from paceline.cluster.records import Claim, RunRecord, World
from paceline.cluster.seat import STORE_LIMIT, Seat, read_claims
from paceline.cluster.store import StoreSpec, open_store, peek
from paceline.errors import CommError, ConfigError


def follow(
    plan: RunPlan, claim: Claim, patience: Patience, sit: Callable[[str], Seat]
) -> tuple[Seat, World]:
    """Find this machine's place in the run.

    Args:
        plan: this machine's part.
        claim: its entry.
        patience: the limit.
        sit: takes a seat in the incarnation of a name.

    Returns:
        the seat, and the sealed world that it is in.

    Raises:
        ConfigError: the machines disagree on their number, or the place is taken.
        TooLate: a machine didn't come; names it.
    """
    meeting = plan.meeting
    assert meeting is not None
    if meeting.kind != "tcp":  # machine 0 serves that one, and may be yet to start
        open_store(meeting, STORE_LIMIT)
    while True:
        reason = ""
        try:
            text, leader = _live_incarnation(meeting, claim, plan, patience)
            seated = _join(plan, text, leader, patience, sit)
            if seated is not None:
                return seated
        except TooLate:
            raise
        except (CommError, DistError) as error:  # machine 0 went, and took the store with it
            reason = f" ({str(error).splitlines()[0].rstrip('.')})"
        patience.wait(name_machines([0], plan.machines) + reason)


def _live_incarnation(
    meeting: StoreSpec, claim: Claim, plan: RunPlan, patience: Patience
) -> tuple[bytes, LeaseWatch]:
    """Wait for an incarnation whose machine 0 is alive; return its record and the watch on it."""
    store = open_store(meeting, STORE_LIMIT)
    known: bytes | None = None
    while True:
        text = peek(store, "run")
        if text is not None:
            if text != known:
                record, known = RunRecord.from_text(text), text
                inside = open_store(meeting.within(record.incarnation), STORE_LIMIT)
                watch = LeaseWatch(inside, record.leader, claim.who)
            if watch.verdict().state == "alive":
                return text, watch
        patience.wait(name_machines([0], plan.machines))


def _join(
    plan: RunPlan, text: bytes, leader: LeaseWatch, patience: Patience, sit: Callable[[str], Seat]
) -> tuple[Seat, World] | None:
    record = RunRecord.from_text(text)
    seat = sit(record.incarnation)
    try:
        if record.machines != plan.machines:
            error = _disagree(plan, record)
            seat.post(Failure.of(error))
            raise error
        _claim(seat, patience)
        world = _await_world(seat, text, leader, patience)
    except BaseException:
        seat.abandon()
        raise
    if world is None:
        seat.abandon()
        return None
    return seat, world


def _claim(seat: Seat, patience: Patience) -> None:
    key, own = seat.key("machine"), seat.claim.to_text()
    while (holder := seat.store.compare_set(key, "", own)) != own.encode():
        watch = LeaseWatch(seat.store, Claim.from_text(holder), seat.claim.who)
        while (verdict := watch.verdict()).state == "unknown":
            patience.wait(f"a sign of life of {watch.claim.who.host}, once {key}")
        if verdict.state == "alive":
            raise ConfigError(
                f"--shard_id {seat.plan.machine} of run {seat.plan.run_id!r} is taken by a live "
                f"machine, host {watch.claim.who.host} ({verdict.reason}): give each machine its "
                "own."
            )
        seat.store.compare_set(key, holder.decode(), own)


def _await_world(seat: Seat, record: bytes, leader: LeaseWatch, patience: Patience) -> World | None:
    """Return the world, or None where it was sealed without us or machine 0 is gone."""
    while True:
        text = peek(seat.store, "world")
        if text is not None:
            world = World.from_text(text)
            return world if seat.claim in world.claims else None
        if peek(seat.run_store, "run") != record or leader.verdict().state == "dead":
            return None
        there = read_claims(seat.store, seat.plan.machines)
        missing = [i for i in range(seat.plan.machines) if i not in there] or [0]
        patience.wait(name_machines(missing, seat.plan.machines))


def _disagree(plan: RunPlan, record: RunRecord) -> ConfigError:
    return ConfigError(
        f"--num_shards {plan.machines} on machine {plan.machine}, but {record.machines} on "
        f"machine 0 ({record.leader.who.host}): give the same number on all machines."
    )
