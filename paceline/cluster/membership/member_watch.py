"""What a member knows of the others of its generation, and which of them it suspects.

    heartbeats, connections' ends, reports of exits, progress, timeouts ── judge ──▶ suspicions

All of it is used on the control line's thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

from paceline.cluster.membership.evidence import (
    CLOSED_GRACE_S,
    EvidenceOptions,
    MemberEvidence,
    Observer,
    Suspicion,
    judge,
)
from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.voting.successor import View

_RECENT = 0.5  # of the peer timeout: how old the last heartbeat of a member may be that is received

_UNSURE = 0.75  # of the peer timeout: without a heartbeat for so long, a member may be frozen,
_UNSURE_S = 1.5  # if beats are missing: one is sent each half second, and looked at as often

_SILENT = ("frozen", "cut off")

TIMED_OUT_S = 2.0
"""Seconds after a timeout in which the members that wait for the same member report theirs."""


class MemberWatch:
    """Watch on the members of the newest generation, from `begin` on.

    Args:
        member: the id of the member that watches.
        options: limits of silence.

    Attributes:
        suspicions: by the members' ids; no suspicion is withdrawn.
        leavers: the ids of members that have reported that they end well.
        was_stopped: whether this process was stopped for longer than the peer timeout, so that the
            others may have expelled it; set by `judge`.
    """

    def __init__(self, member: str, options: EvidenceOptions) -> None:
        self._member = member
        self._options = options
        self._evidence: dict[str, MemberEvidence] = {}
        self._observer = Observer.starting(member, time.monotonic())
        self._reports: dict[str, int] = {}  # the number of each member's last report
        self._received: dict[str, frozenset[str]] = {}  # by member, those whose beats it receives
        self._reported: dict[str, frozenset[str]] = {}  # by member, those that it suspects
        self._told: dict[str, str] = {}  # by member, why another one suspects it
        self._left: set[str] = set()
        self._timed_out_at: float | None = None  # when the first member reported a timeout
        self.suspicions: dict[str, Suspicion] = {}
        self.leavers: set[str] = set()
        self.was_stopped = False

    @property
    def watched(self) -> list[str]:
        """The ids of the generation's members."""
        return list(self._evidence)

    @property
    def view(self) -> View:
        """What this member brings into a vote."""
        return View(suspected=frozenset(self.suspicions), leavers=frozenset(self.leavers))

    @property
    def grace_seconds(self) -> float:
        """The seconds until each member whose connections have ended is suspected, or is back."""
        now = time.monotonic()
        ends = (
            each.closed_at + CLOSED_GRACE_S
            for member, each in self._evidence.items()
            if each.closed_at is not None and member not in (*self.suspicions, *self.leavers)
        )
        return max(0.0, max(ends, default=now) - now)

    @property
    def is_unsure(self) -> bool:
        """Whether a member that isn't suspected has sent no heartbeat for long.

        It sends one soon, or will be suspected.
        """
        silence = max(_UNSURE * self._options.peer_timeout, _UNSURE_S)
        earliest = time.monotonic() - silence
        others = {*self._evidence} - {self._member, *self.suspicions, *self.leavers}
        return any(self._evidence[member].last_beat < earliest for member in others)

    @property
    def unjudged_seconds(self) -> float:
        """The seconds since the last judgment: many, where this process was stopped."""
        return time.monotonic() - self._observer.judged_at

    def cause_of(self, member: str) -> str:
        """Return why a member is suspected, here or by others, a sentence without its stop.

        Returns:
            the reason; "" if no member suspects it.
        """
        suspicion = self.suspicions.get(member)
        return self._told.get(member, "") if suspicion is None else suspicion.reason

    def begin(self, generation: Generation, connected: Set[str]) -> None:
        """Watch the members of the first generation.

        Args:
            connected: the names of the connected peers.
        """
        self._observer = Observer.starting(self._member, time.monotonic())
        self.enter(generation, connected)

    def enter(self, generation: Generation, connected: Set[str]) -> None:
        """Watch the members of the next generation; what is known of them is retained."""
        now = time.monotonic()
        before = self._evidence
        self._evidence = {}
        for rank, member in enumerate(generation.members):
            known = before.get(member.id) or MemberEvidence(
                name=generation.describe(rank),
                last_beat=now,
                step=0,
                progress_at=now,
                # No event comes from a member that never connects,
                # so it counts as one whose connections end now.
                closed_at=None if member.id in {*connected, self._member} else now,
            )
            self._evidence[member.id] = replace(
                known, name=generation.describe(rank), step=0, progress_at=now, timed_out=()
            )
        self.suspicions = {
            member: each for member, each in self.suspicions.items() if member in self._evidence
        }
        self._reported.clear()
        self._told.clear()
        self._left.clear()
        self._timed_out_at = None

    def opened(self, member: str) -> None:
        """Note that a member is connected."""
        self._note(member, closed_at=None, last_beat=time.monotonic())

    def closed(self, member: str) -> None:
        """Note that a member's connections ended."""
        self._note(member, closed_at=time.monotonic())

    def exited(self, member: str, how: str) -> None:
        """Note its supervisor's report of a member's end."""
        self._note(member, exited=how)

    def progressed(self, member: str, step: int, number: int, received: Mapping[str, int]) -> None:
        """Note a member's report.

        Args:
            number: the number of the report.
            received: as `received` returns it on that member.
        """
        self._reports[member] = number
        self._received[member] = frozenset(received)
        known = self._evidence.get(member)
        if known is None or known.step == step:
            return
        now = time.monotonic()
        self._note(member, step=step, progress_at=now)
        for other, each in self._evidence.items():
            if each.step < step and each.behind_at <= each.progress_at:
                self._note(other, behind_at=now)

    def received(self) -> dict[str, int]:
        """Return the members whose heartbeats come, with the numbers of their last reports."""
        earliest = time.monotonic() - _RECENT * self._options.peer_timeout
        return {
            member: number
            for member, number in self._reports.items()
            if member in self._evidence and self._evidence[member].last_beat >= earliest
        }

    def apart(self) -> list[str]:
        """Return the members whose heartbeats don't come, for reports to the others."""
        return [member for member, each in self.suspicions.items() if each.kind in _SILENT]

    def reasons(self) -> dict[str, str]:
        """Return why members are suspected, for reports to the others."""
        return {member: each.reason for member, each in self.suspicions.items()}

    def reported(self, member: str, apart: Iterable[str], reasons: Mapping[str, str]) -> None:
        """Note another member's `apart` and `reasons`."""
        self._reported[member] = frozenset(apart)
        # What was reported first stays: later reasons follow from the loss that came first.
        self._told = {**reasons, **self._told}

    def are_silent(self, members: Set[str]) -> bool:
        """Return whether all these members are suspected, because no heartbeat of them came."""
        return all(
            member in self.suspicions and self.suspicions[member].kind in _SILENT
            for member in members
        )

    def left(self, member: str, *, timed_out: bool) -> bool:
        """Note that a member has left the generation; return whether it is the first to time out.

        Args:
            timed_out: whether it timed out waiting for another one.
        """
        self._left.add(member)
        if not timed_out or self._timed_out_at is not None:
            return False
        self._timed_out_at = time.monotonic()
        return True

    def judge(self, silences: Mapping[str, float], working: Set[str] = frozenset()) -> bool:
        """Judge the evidence; return whether a further member is suspected.

        Args:
            silences: for each connected peer, the seconds since its last heartbeat.
            working: the peers whose last heartbeat carries that they work outside a step.
        """
        now = time.monotonic()
        if now - self._observer.judged_at > self._options.peer_timeout:
            self.was_stopped = True
        for member in self._evidence.keys() & silences.keys():
            beat = now - silences[member]
            self._note(member, last_beat=max(self._evidence[member].last_beat, beat))
        for member in self._evidence.keys() & working:
            self._note(member, outside_at=now)
        self._note(self._member, last_beat=now)
        if self._timed_out_at is not None and now >= self._timed_out_at + TIMED_OUT_S:
            for member in self._evidence:  # those that were interrupted in a wait have left, too
                self._note(member, timed_out=tuple(sorted(self._left - {member})))
        for member in self._evidence:
            others = sorted(self._received.keys() & self._evidence.keys() - {member, self._member})
            receivers = (other for other in others if member in self._received[other])
            self._note(member, received_by=tuple(receivers))
        self._observer = self._observer.at(now)
        judged = self._cut_links() | judge(now, self._evidence, self._options, self._observer)
        present = {one: each for one, each in judged.items() if one not in self.leavers}
        new = present.keys() - self.suspicions.keys()
        self.suspicions.update({member: present[member] for member in new})
        return bool(new)

    def _cut_links(self) -> dict[str, Suspicion]:
        """Suspect one of two members that don't reach each other, while both reach this one.

        All members that reach both suspect the same one, that of the higher rank.
        """
        received = self.received()
        suspected = dict[str, Suspicion]()
        ranks = list(self._evidence)
        for one, apart in self._reported.items():
            for other in apart & received.keys():
                if one in received and self._member not in (one, other):
                    lower, higher = sorted((one, other), key=ranks.index)
                    names = self._evidence[higher].name, self._evidence[lower].name
                    suspected[higher] = Suspicion(
                        kind="cut off",
                        reason=f"the link between {names[0]} and {names[1]} is cut, and the others "
                        "continue without the first",
                    )
        return suspected

    def _note(self, member: str, **fields: Any) -> None:
        known = self._evidence.get(member)
        if known and any(getattr(known, name) != value for name, value in fields.items()):
            self._evidence[member] = replace(known, **fields)
