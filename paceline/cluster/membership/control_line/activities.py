"""What the members of a world do: they work outside a step, are in one, or wait outside one.

    beats      a number: what the member does; also while a thread holds the interpreter's lock
    "doing"    a frame, where a member does the same for a second: after which step, in which call,
               and at which line of the script

A rank that waits for its peers looks here. A peer that works outside a step is waited for. A peer
that makes another call, or a step instead of a call, never comes to this one.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.cluster.membership.control_line.frame_kinds import DOING
from paceline.cluster.membership.control_line.line import ControlLine
from paceline.cluster.membership.generation import Generation
from paceline.comm.communicator import not_on_all
from paceline.comm.peer_waits import LOOK_S, PeerWait, PeerWaits
from paceline.errors import ConfigError, IdleTimeout, Message

WORKING, STEP, WAITING, ENDED = range(4)
"""What beats say: outside a step; in a step; waiting outside a step; gone from the world."""

_TICK_S = 1.0
_REPEAT_S = 5.0  # between frames that say the same: a connection may be new
_QUIET_S = 10.0  # of a wait for a peer that works outside a step, before a line says so
_PACKAGE = str(Path(__file__).parents[3]) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Activity of a member.

    Attributes:
        doing: one of the numbers of beats.
        token: of the generation in which it is.
        steps: the number of steps that it has completed; in a step, that step's number.
        calls: the number of calls that all ranks make, and that it has begun in the generation; -1
            where a loss has made the numbers differ.
        call: the call in which it is; "" between calls.
        did: the last call that it has ended since its last step; "" if there is none.
        place: the line of the script at which it is; "" if there is none.
    """

    doing: int = WORKING
    token: str = ""
    steps: int = 0
    calls: int = 0
    call: str = ""
    did: str = ""
    place: str = ""

    @property
    def sentence(self) -> str:
        """What the member did last, and where it is: a clause."""
        done = f"its last step was step {self.steps - 1:,}" if self.steps else "it has made no step"
        did = f"; then came {self.did}" if self.did else ""
        place = f"; it is at {self.place}" if self.place else ""
        return f"{done}{did}{place}"


class Activities(PeerWaits):
    """Activities of this member and of the others, by a control line.

    The training thread changes this member's; the line's thread receives the others'.

    Args:
        line: the control line; frames of the kind DOING are to be given to `received`.
        generation: the first generation.
        member: this member's id.
        idle_timeout: seconds for which a member may work outside a step while another waits.
        peer_timeout: seconds without a beat after which a member isn't known to work.
        report: prints a line.
    """

    def __init__(
        self,
        line: ControlLine,
        generation: Generation,
        member: str,
        *,
        idle_timeout: float,
        peer_timeout: float,
        report: Callable[[Message], object],
    ) -> None:
        self.longest = idle_timeout
        self._line, self._member, self._report = line, member, report
        self._peer_timeout = peer_timeout
        self._trainer = threading.get_ident()
        self._lock = threading.Lock()  # guards `_others` and `_reported`
        self._others: dict[str, Activity] = {}
        self._reported: set[tuple[str, int, str]] = set()
        self._generation = generation
        self._changes = 0  # counts what this member has begun to do
        self._doing = WORKING
        self._steps = 0
        self._calls = 0
        self._call = ""
        self._checked = False  # whether a peer that makes another call is an error
        self._remedy = ""  # of such an error
        self._did = ""
        self._seen = -1  # what follows is used on the line's thread
        self._sent = Activity()
        self._sent_at = 0.0
        line.post(self._tick)

    # Calls of the training thread.

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Report that this rank is in a step for as long as the block lasts."""
        self._calls = max(self._calls, 0)  # a generation's ranks begin with the same step
        self._steps = number
        self._do(STEP)
        try:
            yield
            self._steps = number + 1
        finally:
            self._did = ""
            self._do(WORKING)

    @contextmanager
    def call(self, call: str, *, checked: bool = True, remedy: str = "") -> Iterator[None]:
        """Report that the block is of a call that all ranks make, in the same order."""
        if self._call:  # one call makes another
            yield
            return
        if self._calls >= 0:
            self._calls += 1
        self._checked = checked
        self._remedy = remedy
        self._call = call
        self._changes += 1
        try:
            yield
        finally:
            self._call = ""
            self._did = call
            self._changes += 1

    def enter(self, generation: Generation) -> None:
        """Report that this member has come to enter a later generation."""
        self._calls = -1
        self._generation = generation
        self._do(WORKING)
        self._line.post(self._send)

    def absent(self) -> list[str]:
        """Return the members that haven't come to enter the present generation."""
        token = self._generation.token
        with self._lock:
            others = dict(self._others)
        return [
            member.id
            for member in self._generation.members
            if member.id != self._member and others.get(member.id, Activity()).token != token
        ]

    def close(self) -> None:
        """Report that this rank has left the world."""
        self._do(ENDED)
        self._line.post(self._send)

    def begin(self, operation: str) -> PeerWait:
        """Begin to look at the peers, in a wait for them; from any thread."""
        return _Wait(self, operation)

    # Calls of the line's thread.

    def received(self, peer: str, body: Mapping[str, Any]) -> None:
        """Note what another member does."""
        with self._lock:
            self._others[peer] = Activity(**body)

    def working(self) -> set[str]:
        """Return the connected peers whose beats say that they work outside a step."""
        return {peer for peer in self._line.connected() if self._line.said(peer) == WORKING}

    def _tick(self) -> None:
        """Send what this member does, again and again, where it has done it for a while."""
        if self._doing == ENDED:
            return
        if self._changes == self._seen:
            self._send()
        self._seen = self._changes
        self._line.call_later(_TICK_S, self._tick)

    def _send(self) -> None:
        own = self.own()
        now = time.monotonic()
        if own != self._sent or now > self._sent_at + _REPEAT_S:
            self._sent = own
            self._sent_at = now
            members = [member.id for member in self._generation.members]
            self._line.broadcast(DOING, asdict(own), members)

    # Calls of a wait, from any thread.

    def own(self) -> Activity:
        """Return what this member does."""
        return Activity(
            doing=self._doing,
            token=self._generation.token,
            steps=self._steps,
            calls=self._calls,
            call=self._call,
            did=self._did,
            place=_place_of(sys._current_frames().get(self._trainer)),
        )

    def busy(self) -> dict[str, Activity]:
        """Return the other members that work outside a step, and what is known of them."""
        working = self.working()
        with self._lock:
            others = dict(self._others)
        return {
            member.id: others.get(member.id, Activity())
            for member in self._generation.members
            if member.id in working and self._line.silence(member.id) <= self._peer_timeout
        }

    def require_same_calls(self) -> None:
        """Require that no peer makes another call than this rank, or has gone on without it.

        Raises:
            ConfigError: one does, which never comes to what this rank waits for.
        """
        if not self._call or not self._checked or self._calls < 0 or self._doing == STEP:
            return
        with self._lock:
            others = dict(self._others)
        for rank, member in enumerate(self._generation.members):
            other = others.get(member.id)
            if other is None or member.id == self._member:
                continue
            if other.token != self._generation.token or other.calls < 0:
                continue
            instead = self._instead(other)
            if instead:
                ids = [each.id for each in self._generation.members]
                if not self._remedy:
                    raise not_on_all(self._call, ids.index(self._member), rank, instead)
                raise ConfigError(
                    f"{self._call} was reached on rank {ids.index(self._member)} and not on rank "
                    f"{rank}, {instead}: all ranks must make the same calls in the same order. "
                    f"{self._remedy}"
                )

    def _instead(self, other: Activity) -> str:
        """Return what another member does instead of this member's call; "" if it may come.

        Where this member has only reached a place, the other one says what it does instead of that.
        """
        if other.calls < self._calls and other.doing == STEP and other.steps >= self._steps:
            return f"which is in step {other.steps:,}"
        if other.calls < self._calls and other.steps > self._steps:
            return f"which has made step {other.steps - 1:,}"
        if self._remedy:
            return ""
        if other.doing == ENDED and other.calls <= self._calls:  # its last call was the end
            return "which has ended its world"
        if other.calls == self._calls and other.call not in ("", self._call):
            return f"which is in {other.call}"
        return ""

    def report_busy(self, operation: str, busy: Mapping[str, float]) -> None:
        """Print once that members work outside a step, on the first rank that waits for them.

        Args:
            operation: what this rank waits in.
            busy: for how many seconds this wait has seen each member work.
        """
        ids = [member.id for member in self._generation.members]
        working = self.working()
        if next((each for each in ids if each not in working), "") != self._member:
            return
        known = self.busy()
        for member in busy.keys() & known.keys():
            what = known[member]
            with self._lock:
                if (member, what.steps, what.did) in self._reported:
                    continue
                self._reported.add((member, what.steps, what.did))
            self._report(
                Message(
                    "{} waits in {} for {}, which has worked outside a step for {:.0f} s: {}. All "
                    "wait for it, up to {:g} s ({--idle_timeout}).",
                    self._generation.name_of(self._member),
                    operation,
                    self._generation.name_of(member),
                    busy[member],
                    what.sentence,
                    self.longest,
                )
            )

    def timed_out(self, operation: str, member: str, seconds: float) -> IdleTimeout:
        """Return the error of a wait for a member that works outside a step for too long."""
        with self._lock:
            what = self._others.get(member, Activity())
        return IdleTimeout(
            Message(
                "{} has worked outside a step for {:.0f} s ({--idle_timeout} {:g}), while {} waits "
                "for it in {}: {}. Give a longer {--idle_timeout}, or divide that work among all "
                "ranks (world.evaluation).",
                self._generation.name_of(member),
                seconds,
                self.longest,
                self._generation.name_of(self._member),
                operation,
                what.sentence,
            )
        )

    def begin_waiting(self) -> bool:
        """Report that this rank waits, if the training thread does so outside a step."""
        waits = threading.get_ident() == self._trainer and self._doing == WORKING
        if waits:
            self._do(WAITING)
        return waits

    def end_waiting(self) -> None:
        """Report that this rank works again."""
        if self._doing == WAITING:
            self._do(WORKING)

    def _do(self, doing: int) -> None:
        self._doing = doing
        self._changes += 1
        self._line.say(doing)


class _Wait(PeerWait):
    """Wait that looks at the activities of the peers."""

    def __init__(self, activities: Activities, operation: str) -> None:
        self._activities, self._operation = activities, operation
        self._looked_at = time.monotonic() - LOOK_S
        self._busy: dict[str, float] = {}  # for how many seconds, without a break, by member
        self._waits = activities.begin_waiting()

    def look(self) -> float:
        """Return for how many seconds, since the last look, a peer worked outside a step."""
        now = time.monotonic()
        passed = now - self._looked_at
        self._looked_at = now
        self._activities.require_same_calls()
        busy = self._activities.busy()
        self._busy = {member: self._busy.get(member, 0.0) + passed for member in busy}
        for member, seconds in self._busy.items():
            if seconds > self._activities.longest:
                raise self._activities.timed_out(self._operation, member, seconds)
        quiet = {member: each for member, each in self._busy.items() if each > _QUIET_S}
        if quiet:
            self._activities.report_busy(self._operation, quiet)
        return passed if busy else 0.0

    def end(self) -> None:
        """End the wait."""
        if self._waits:
            self._activities.end_waiting()


def _place_of(frame: FrameType | None) -> str:
    """Return the innermost line that is neither of Paceline nor of an installed library."""
    while frame is not None:
        file = frame.f_code.co_filename
        own = file.startswith(_PACKAGE) or file.startswith(_LIBRARIES) or file.startswith("<")
        if not own:
            where = f"{file}:{frame.f_lineno}"
            name = frame.f_code.co_name
            return where if name == "<module>" else f"{where} in {name}()"
        frame = frame.f_back
    return ""
