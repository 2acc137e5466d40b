"""Evidence about the members of a generation: which of them to suspect, and why.

    exited    the kernel or a supervisor reports its end          at once
    closed    its connections ended                               after 0.2 s, in which a report of
                                                                  its exit may come
    frozen    no heartbeat for longer than the peer timeout       connected, or taken for it
    cut off   the same, but other members receive its heartbeats
    slow      heartbeats, but no progress for the timeout         only the member that is behind,
                                                                  and only inside a step

`judge` is a function of values. Its clock is the judging process's monotonic clock; the clocks of
different machines are never compared. A process that was paused received nothing meanwhile, so it
counts silences from the end of its pause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from paceline.errors import Message

CLOSED_GRACE_S = 0.2
"""Seconds between the end of a member's connections and the suspicion that it is lost."""

PAUSE_S = 1.0
"""A gap between a process's judgments that is longer, in seconds, was a pause of the process."""


@dataclass(frozen=True, kw_only=True)
class EvidenceOptions:
    """Limits of silence.

    Attributes:
        peer_timeout: seconds without a heartbeat.
        timeout: seconds without progress in a step.
        idle_timeout: seconds for which a member may work outside a step while another waits.
    """

    peer_timeout: float
    timeout: float
    idle_timeout: float = 1800.0


@dataclass(frozen=True, kw_only=True)
class Observer:
    """The judging member and its pauses.

    Attributes:
        id: the id of the judging member, which doesn't suspect itself.
        judged_at: when it last judged.
        resumed_at: when its last pause ended, or when it began to judge.
    """

    id: str
    judged_at: float
    resumed_at: float

    @classmethod
    def starting(cls, member: str, now: float) -> Self:
        """Return the observer of a member that begins to judge now."""
        return cls(id=member, judged_at=now, resumed_at=now)

    def at(self, now: float) -> Self:
        """Return the observer of the judgment that comes now."""
        paused = now - self.judged_at > PAUSE_S
        return replace(self, judged_at=now, resumed_at=now if paused else self.resumed_at)


@dataclass(frozen=True, kw_only=True)
class MemberEvidence:
    """What the judging member knows of one member, or of itself.

    Attributes:
        name: what messages call it, such as "rank 1 on machine 1 (hostB)".
        last_beat: when its last heartbeat came, or when it became a member.
        step: the step in which it is, by its last report of progress; 0 until it has completed a
            step of the generation, which may take long.
        progress_at: when that report came.
        outside_at: when its heartbeats last carried that it works outside a step.
        behind_at: when another member was first reported in a later step, since that report.
        exited: how it exited, such as "exited with signal 9 (SIGKILL)"; None without a report.
        closed_at: when its last connection ended; None while it is connected.
        received_by: the ids of the members whose latest reports say that its heartbeats come.
        timed_out: the ids of the members that announced the timeout of a collective operation of
            which it is a participant.
    """

    name: str
    last_beat: float
    step: int
    progress_at: float
    outside_at: float = float("-inf")
    behind_at: float = float("-inf")
    exited: str | None = None
    closed_at: float | None = None
    received_by: tuple[str, ...] = ()
    timed_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """Suspicion that a member is lost, and the reason: a sentence without its stop."""

    kind: Literal["exited", "closed", "frozen", "cut off", "slow"]
    reason: str


def judge(
    now: float,
    evidence: Mapping[str, MemberEvidence],
    options: EvidenceOptions,
    observer: Observer,
) -> dict[str, Suspicion]:
    """Return the suspected members by id.

    Args:
        now: the time of the judgment.
        evidence: for each member by id, what is known of it; the judging member is included for
            its progress.
        options: the limits.
        observer: `observer.at(now)` of the judgment before.
    """
    lost = {
        member: suspicion
        for member, each in evidence.items()
        if member != observer.id
        and (
            suspicion := _ended(now, each)
            or _silent(now, each, _receivers(now, each, evidence, options), options, observer)
        )
    }
    remaining = {member: each for member, each in evidence.items() if member not in lost}
    return lost | _slow(now, remaining, options, observer)


def _ended(now: float, member: MemberEvidence) -> Suspicion | None:
    if member.exited is not None:
        return Suspicion(kind="exited", reason=f"{member.name} {member.exited}")
    if member.closed_at is not None and now - member.closed_at >= CLOSED_GRACE_S:
        age = now - member.closed_at
        return Suspicion(
            kind="closed", reason=f"the connections of {member.name} ended {age:.1f} s ago"
        )
    return None


def _silent(
    now: float,
    member: MemberEvidence,
    receivers: list[str],
    options: EvidenceOptions,
    observer: Observer,
) -> Suspicion | None:
    silence = now - max(member.last_beat, observer.resumed_at)
    if silence <= options.peer_timeout:
        return None
    template = "{} has sent no heartbeat for {:.1f} s ({--peer_timeout} {:g})"
    values = (member.name, silence, options.peer_timeout)
    if not receivers:
        return Suspicion(kind="frozen", reason=Message(template, *values))
    names = ", ".join(receivers)
    reason = Message(template + "; only the link is cut: {} received heartbeats", *values, names)
    return Suspicion(kind="cut off", reason=reason)


def _receivers(
    now: float,
    member: MemberEvidence,
    evidence: Mapping[str, MemberEvidence],
    options: EvidenceOptions,
) -> list[str]:
    """Name the members that receive the heartbeats of `member`, as they report to this process."""
    reporters = [evidence[other] for other in member.received_by if other in evidence]
    return [
        each.name
        for each in reporters
        if _ended(now, each) is None and now - each.last_beat <= options.peer_timeout
    ]


def _slow(
    now: float,
    evidence: Mapping[str, MemberEvidence],
    options: EvidenceOptions,
    observer: Observer,
) -> dict[str, Suspicion]:
    """Return those without progress that the others wait for, and that wait for no other.

    Members that announced a timeout are themselves waiting. A member that works outside a step is
    waited for; the time within the next step counts from its begin. A step may take long on all
    members: the time of one that is behind counts from when another was ahead of it. A member's
    first step has a limit of its own: only such a timeout makes it slow.
    """
    waiting = {other for each in evidence.values() for other in each.timed_out}
    first = min(evidence, key=lambda member: evidence[member].step, default=None)
    last = max(evidence, key=lambda member: evidence[member].step, default=None)
    if first is None or last is None:
        return {}
    suspected = {}
    for member, each in evidence.items():
        reported_at = max(each.progress_at, each.behind_at)
        age = now - max(reported_at, each.outside_at, observer.resumed_at)
        behind = 0 < each.step == evidence[first].step < evidence[last].step
        awaited = [evidence[other].name for other in each.timed_out if other in evidence]
        if age <= options.timeout or member in waiting or member == observer.id:
            continue
        if behind or (awaited and each.step == evidence[first].step):
            if behind:
                ahead = f"{evidence[last].name} is in step {evidence[last].step:,}"
            else:
                ahead = f"{', '.join(awaited)} timed out waiting in it"
            suspected[member] = Suspicion(
                kind="slow",
                reason=Message(
                    "{} has made no progress for {:.1f} s ({--timeout} {:g}): it is in step {:,}, "
                    "and {}",
                    *(each.name, age, options.timeout, each.step, ahead),
                ),
            )
    return suspected
