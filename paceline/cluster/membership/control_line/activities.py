"""Activities of a world's members: each works outside a step, is in one, or waits outside one.

    beats         a number, the member's state; also while a thread holds the interpreter's lock
    "activity"    a frame, where a member does the same for a second: after which step, in which
                  call, and at which line of the script

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

from paceline.cluster.membership.control_line.frame_kinds import ACTIVITY
from paceline.cluster.membership.control_line.line import ControlLine
from paceline.cluster.membership.evidence import EvidenceOptions
from paceline.cluster.membership.generation import Generation
from paceline.comm.communicator import not_on_all
from paceline.comm.peer_activities import PeerActivities
from paceline.errors import ConfigError, IdleTimeout, Message

WORKING, STEP, WAITING, ENDED = range(4)
"""States that beats carry: outside a step; in a step; waiting outside a step; out of the world."""

_TICK_S = 1.0
_REPEAT_S = 5.0  # between equal frames: a connection may be new
_HEARD_S = 3.0  # since a peer's last beat, within which it is said to work
_QUIET_S = 10.0  # of a wait for a peer that works outside a step, before it is reported
_PACKAGE = str(Path(__file__).parents[3]) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Activity of a member.

    Attributes:
        state: one of the numbers that beats carry.
        token: of the generation in which it is.
        steps: the number of steps that it has completed; in a step, that step's number.
        calls: the number of calls that all ranks make, and that it has begun in the generation; -1
            where a loss has made the numbers differ.
        call: the call in which it is; "" between calls.
        last_call: the last call that it has ended since its last step; "" if there is none.
        script_line: the line of the script at which it is; "" if there is none.
    """

    state: int = WORKING
    token: str = ""
    steps: int = 0
    calls: int = 0
    call: str = ""
    last_call: str = ""
    script_line: str = ""

    @property
    def sentence(self) -> str:
        """What the member did last, and where it is: a clause."""
        done = f"its last step was step {self.steps - 1:,}" if self.steps else "it has made no step"
        call = f"; then came {self.last_call}" if self.last_call else ""
        place = f"; it is at {self.script_line}" if self.script_line else ""
        return f"{done}{call}{place}"


class Activities(PeerActivities):
    """Activities of this member and of the others, by a control line.

    The training thread changes this member's; the line's thread receives the others'.

    Args:
        line: the control line; frames of the kind ACTIVITY are to be given to `received`.
        generation: the first generation.
        member: this member's id.
        options: limits of silence.
        report: prints a line.
    """

    def __init__(
        self,
        line: ControlLine,
        generation: Generation,
        member: str,
        options: EvidenceOptions,
        report: Callable[[Message], object],
    ) -> None:
        self.longest = options.idle_timeout
        self._line = line
        self._member = member
        self._report = report
        self._peer_timeout = options.peer_timeout
        # The constructor runs on the training thread, whose line in the script the reports name.
        self._trainer = threading.get_ident()
        self._lock = threading.Lock()  # guards `_others` and `_reported`
        self._others: dict[str, Activity] = {}
        self._reported: set[tuple[str, int, str]] = set()
        self._generation = generation
        self._changes = 0  # counts what this member has begun to do
        self._state = WORKING
        self._steps = 0
        self._calls = 0
        self._call = ""
        self._checked = False  # whether a peer that makes another call is an error
        self._remedy = ""  # of such an error
        self._last_call = ""
        self._seen = -1  # what follows is used on the line's thread
        self._sent = Activity()
        self._sent_at = 0.0
        line.post(self._tick)

    # Calls of the training thread.

    def begin_step(self, number: int) -> None:
        """Report that this rank is in a step, until `end_step`."""
        self._calls = max(self._calls, 0)  # compared again: all ranks are at the same step
        self._steps = number
        self._set(STEP)

    def end_step(self, *, done: bool) -> None:
        """Report that this rank has left its step."""
        self._steps += done
        self._last_call = ""
        self._set(WORKING)

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
            self._last_call = call
            self._changes += 1

    def enter(self, generation: Generation) -> None:
        """Report that this member has come to enter a later generation.

        Calls aren't compared until the next step: ranks enter it at different ones.
        """
        self._calls = -1
        self._generation = generation
        self._set(WORKING)
        self._line.post(self._send)

    def absent(self) -> list[str]:
        """Return the members that haven't come to enter the present generation."""
        token = self._generation.token
        others = self._known()
        return [
            member.id
            for member in self._generation.members
            if member.id != self._member and others.get(member.id, Activity()).token != token
        ]

    def close(self) -> None:
        """Report that this rank has left the world."""
        self._set(ENDED)
        self._line.post(self._send)

    # Calls of the line's thread.

    def received(self, peer: str, body: Mapping[str, Any]) -> None:
        """Note what another member does."""
        with self._lock:
            self._others[peer] = Activity(**body)

    def working(self) -> set[str]:
        """Return the connected peers whose beats carry that they work outside a step."""
        return {peer for peer in self._line.connected() if self._line.carried(peer) == WORKING}

    def _tick(self) -> None:
        """Send what this member does, again and again, where it has done it for a while."""
        if self._state == ENDED:
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
            self._line.broadcast(ACTIVITY, asdict(own), members)

    # Calls of a wait, from any thread.

    def look(self, operation: str, busy: dict[str, float], passed: float) -> float:
        """Look at the peers in a wait; as `PeerActivities.look`."""
        self._require_same_calls()
        now = {member: busy.get(member, 0.0) + passed for member in self.busy()}
        busy.clear()
        busy.update(now)
        for member, seconds in busy.items():
            if seconds > self.longest:
                raise self._timed_out(operation, member, seconds)
        self._report_busy(operation, busy)
        return passed if busy else 0.0

    def own(self) -> Activity:
        """Return what this member does."""
        return Activity(
            state=self._state,
            token=self._generation.token,
            steps=self._steps,
            calls=self._calls,
            call=self._call,
            last_call=self._last_call,
            script_line=_script_line(sys._current_frames().get(self._trainer)),
        )

    def busy(self) -> list[str]:
        """Return the other members that work outside a step, and send beats."""
        working = self.working()
        return [
            member.id
            for member in self._generation.members
            if member.id in working and self._line.silence(member.id) <= self._peer_timeout
        ]

    def _known(self) -> dict[str, Activity]:
        with self._lock:
            return dict(self._others)

    def _require_same_calls(self) -> None:
        """Require that no peer makes another call than this rank, or has gone on without it.

        Raises:
            ConfigError: one does, which never comes to what this rank waits for.
        """
        if not self._call or not self._checked or self._calls < 0 or self._state == STEP:
            return
        others = self._known()
        ids = [member.id for member in self._generation.members]
        for rank, member in enumerate(ids):
            other = others.get(member)
            if other is None or member == self._member:
                continue
            if other.token != self._generation.token or other.calls < 0:
                continue
            instead = self._instead(other)
            if instead:
                rank_here = ids.index(self._member)
                if not self._remedy:
                    raise not_on_all(self._call, rank_here, rank, instead)
                raise ConfigError(
                    f"rank {rank_here} has reached {self._call}, but rank {rank} {instead}: all "
                    f"ranks must make the same calls in the same order. {self._remedy}"
                )

    def _instead(self, other: Activity) -> str:
        """Return what another member does instead of this member's call; "" if it may come.

        Where this member has only reached a place, the other one says what it does instead of that.
        """
        if other.calls < self._calls and other.state == STEP and other.steps >= self._steps:
            return f"is in step {other.steps:,}"
        if other.calls < self._calls and other.steps > self._steps:
            return f"has made step {other.steps - 1:,}"
        if self._remedy:
            return ""
        if other.state == ENDED and other.calls <= self._calls:  # `close` was its last call
            return "has closed its world"
        if other.calls == self._calls and other.call not in ("", self._call):
            return f"is in {other.call}"
        return ""

    def _report_busy(self, operation: str, busy: Mapping[str, float]) -> None:
        """Print once that ranks work outside a step for long, on the first one that waits."""
        working = self.working()
        ids = [member.id for member in self._generation.members]
        first = next((each for each in ids if each not in working), "")
        others = self._known()
        for member, seconds in busy.items():
            what = others.get(member, Activity())
            key = (member, what.steps, what.last_call)
            with self._lock:
                if seconds <= _QUIET_S or first != self._member or key in self._reported:
                    continue
                if self._line.silence(member) > _HEARD_S:  # it may be gone, or soon be lost
                    continue
                self._reported.add(key)
            self._report(
                Message(
                    "{} waits in {} for {}, which has worked outside a step for {:.0f} s: {}. All "
                    "wait for it, up to {:g} s ({--idle_timeout}).",
                    self._generation.name_of(self._member),
                    operation,
                    self._generation.name_of(member),
                    seconds,
                    what.sentence,
                    self.longest,
                )
            )

    def _timed_out(self, operation: str, member: str, seconds: float) -> IdleTimeout:
        """Return the error of a wait for a member that works outside a step for too long."""
        what = self._known().get(member, Activity())
        return IdleTimeout(
            Message(
                "{} has worked outside a step for {:.0f} s ({--idle_timeout} {:g}), while {} waits "
                "for it in {}: {}. Give a longer {--idle_timeout}, or divide that work among all "
                "ranks: an evaluation by world.evaluation(), say.",
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
        waits = threading.get_ident() == self._trainer and self._state == WORKING
        if waits:
            self._set(WAITING)
        return waits

    def end_waiting(self) -> None:
        """Report that this rank works again."""
        if self._state == WAITING:
            self._set(WORKING)

    def _set(self, state: int) -> None:
        self._state = state
        self._changes += 1
        self._line.carry(state)


def _script_line(frame: FrameType | None) -> str:
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
