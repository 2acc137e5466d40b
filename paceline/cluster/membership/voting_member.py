"""Voting member: a member's part in deciding which members the next generation has.

    control line ── evidence ── suspicion ── vote ── decided
                                    │                   └▶ next_generation() returns
                                    └▶ the present generation's waits are interrupted

All of it happens on the control line's thread, except for the calls of the training thread and of
others: the first section. The training thread leaves its generation at its next communication,
which the interrupt ends with an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from torch._C._distributed_c10d import Store

from paceline.cluster.jitter import jitter
from paceline.cluster.membership.ballots.acceptor_links import AcceptorLinks
from paceline.cluster.membership.ballots.vote import Vote
from paceline.cluster.membership.control_line.activities import Activities
from paceline.cluster.membership.control_line.frame_kinds import (
    ACTIVITY,
    END,
    EXITED,
    LEAVING,
    LEFT,
    PROGRESS,
    PROMISED,
    STORE,
    SUSPECTED,
    VOTE,
    supervisor_name,
)
from paceline.cluster.membership.control_line.line import ControlLine
from paceline.cluster.membership.control_store import ControlStore, ControlStores
from paceline.cluster.membership.evidence import CLOSED_GRACE_S, EvidenceOptions
from paceline.cluster.membership.generation import Generation, Group, Member
from paceline.cluster.membership.generation_waits import (
    Change,
    GenerationWaits,
    OutsideWorld,
    left_out,
    without_quorum,
    without_replica,
)
from paceline.cluster.membership.leases.write_lease import WriteLease
from paceline.cluster.membership.machine_acceptor import MachineAcceptor
from paceline.cluster.membership.member_watch import TIMED_OUT_S, MemberWatch
from paceline.cluster.membership.protocol import FrameHandler
from paceline.cluster.membership.voting.messages import (
    WITNESS,
    Answer,
    Decided,
    Held,
    Refused,
)
from paceline.cluster.membership.voting.successor import is_quorum
from paceline.cluster.membership.witness import Witness
from paceline.cluster.print_message import print_message
from paceline.comm.peer_activities import WaitLimit
from paceline.errors import CommError, CommTimeout, Message, PeerLost, many

# A loss is found late by half the interval on average: a tenth of
# the peer timeout keeps that below 5% of it. More often than twice a
# second finds nothing sooner, because a peer beats twice a second.
_JUDGE_S = 0.5  # between two judgments of the evidence, unless the peer timeout is short
_JUDGE_SHARE = 0.1  # of the peer timeout
# A report renews the write lease of its sender for one peer timeout. Four of them fit into that
# time, so that one which is late ends no lease.
_PROGRESS_S = 1.0  # between two reports of progress, unless the peer timeout is short
_PROGRESS_SHARE = 0.25  # of the peer timeout
# A member that leaves its generation has met the end of a connection, and the suspicion follows
# within that time. A ballot before it would propose the lost member again.
_EVIDENCE_S = CLOSED_GRACE_S + 0.1  # a lost connection is followed by evidence within that time
_ROUNDING_S = 0.01  # by which the judgment follows a lost connection's grace
# Two ballots at once refuse each other, so all but the first member give its ballot that time, and
# random pauses keep the others apart.
_TURN_S = 0.5  # before a member proposes whose turn it isn't
_ALIVE_S = 2.0  # of silence, up to which a supervisor counts as alive
# Short beside the 20 ms and more in which a generation's connections are made.
_ENTRY_POLL_S = 0.005  # between two looks whether all have come to a generation
# The outcome of the vote travels to expelled members by the connections that are closed after it.
_FORGET_S = 1.0  # after which the connections to a lost member are closed


class VotingMember:
    """Voting member: this process as one, from its first generation to the end of the run.

    Args:
        generation: the first generation.
        member: this process's member.
        secret: the secret of the control line.
        acceptor: this machine as an acceptor.
        witness: the witness, if `generation` names one.
        options: limits of silence.
        report: prints a line.

    Attributes:
        activities: what the members do.
        waits: what the loss of a member interrupts.
    """

    def __init__(
        self,
        generation: Generation,
        member: Member,
        *,
        secret: bytes,
        acceptor: MachineAcceptor,
        witness: Witness | None = None,
        options: EvidenceOptions,
        report: Callable[[Message], object] = lambda line: None,
    ) -> None:
        self._member = member
        self._acceptor = acceptor
        self._options = options
        self._handlers: dict[str, FrameHandler] = {}
        self._progress = "", 0  # the id of a generation, and the step; by the training thread
        self._end_asked: Callable[[bool], None] = lambda supervised: None
        self._stores = ControlStores()
        self._acceptors = AcceptorLinks(generation, acceptor, witness, self)
        self.waits = GenerationWaits(self._stores)
        self._lease = WriteLease(member.id, options.peer_timeout)
        # What follows is used on the line's thread only.
        self._generation = generation  # that is voted upon next
        self._began = False
        self._closing = self._ending = False
        self._watch = MemberWatch(member.id, options)
        self._detected_at = 0.0
        self._vote: Vote | None = None
        self.line = ControlLine(
            name=member.id,
            secret=secret,
            address=member.address,
            handler=self,
            tcp_timeout=max(60.0, 2 * options.peer_timeout),
        )
        self._acceptors.connect(self.line)
        self.activities = Activities(self.line, generation, member.id, options, report)

    @property
    def id(self) -> str:
        """The id of this process's member."""
        return self._member.id

    def handle(self, kind: str, handler: FrameHandler) -> None:
        """Let frames of a further kind be handled on the line's thread."""
        self._handlers[kind] = handler

    # Calls of the training thread.

    def begin(self, generation: Generation) -> None:
        """Take part in votes from now on: the first generation is complete, with its number."""

        def start() -> None:
            self._generation = generation
            self._began = True
            self._watch.begin(generation, self.line.connected())
            self._lease.enter(self._watch.watched)
            self._judge()
            self._report()

        self._on_line(start)

    def await_members(self, group: Group) -> None:
        """Wait until all members of a later generation have come to enter it.

        Raises:
            PeerLost: the generation has ended before.
            CommTimeout: a member that doesn't work outside a step didn't come in time.
            IdleTimeout: a member works outside a step for too long.
        """
        generation = group.generation
        self.activities.enter(generation)
        timeout = self._options.timeout
        with WaitLimit(timeout, self.activities, "the next generation") as limit:
            while absent := self.activities.absent():
                if self.waits.has_ended(generation):
                    raise PeerLost(
                        f"Generation {generation.number} has ended before all its ranks entered it."
                    )
                if limit.look():
                    names = ", ".join(str(generation.name_of(member)) for member in absent)
                    raise CommTimeout(
                        Message(
                            "after a loss, {} didn't enter generation {} within {:g} s "
                            "({--timeout}): check its output.",
                            names,
                            generation.number,
                            timeout,
                        )
                    )
                time.sleep(_ENTRY_POLL_S)

    def store_of(self, group: Group) -> Store:
        """Return the store of a later generation; it serves until the generation ends."""
        generation = group.generation

        def open_store() -> ControlStore:
            return ControlStore(
                self.line,
                generation.leader.id,
                generation.leader.id == self._member.id,
                generation.key_prefix,
                timedelta(seconds=self._options.timeout),
            )

        return self.waits.store_of(generation, open_store)

    def acknowledge(self, generation: Generation, held: tuple[Held, ...]) -> bool:
        """Record what this member holds; return False where nothing may be acknowledged."""
        return self._acceptor.acknowledge(generation, self._member.id, held)

    def may_write(self) -> bool:
        """Return whether this member is in the world, from any thread; wait until that is known.

        It is known as long as the others receive this member's reports, and after a vote.
        """
        return self._lease.wait(self._options.timeout + 2 * self._options.peer_timeout)

    def lease_lasts(self) -> bool:
        """Return whether this member is known to be in the world now, from any thread."""
        return self._lease.lasts

    def require_member(self, generation: Generation) -> None:
        """Return if this member may record results of a generation; waits as `may_write`.

        Raises:
            PeerLost: it may not, because the next generation is being decided, or is.
        """
        if not self.may_write() or self._acceptor.has_promised(generation):
            raise PeerLost(f"Generation {generation.number} records nothing more: it has ended.")

    def report_progress(self, generation: Generation, step: int) -> None:
        """Note in which step this member is, once it has completed one of the generation."""
        self._progress = generation.id, step

    def next_generation(self, present: Generation, error: CommError) -> Change:
        """Leave the present generation, and wait for the decision about the next one.

        Args:
            present: the generation that can't continue.
            error: why this member leaves it.

        Raises:
            OutsideWorld: this member isn't in the next generation, or no decision is possible.
        """
        timed_out = isinstance(error, CommTimeout)
        self._on_line(lambda: self._leave(present, str(error), timed_out=timed_out))
        limit = 2 * self._options.timeout + 2 * self._options.peer_timeout + TIMED_OUT_S
        change = self.waits.next(present, limit)
        if change is None:
            raise OutsideWorld(f"No decision about the next generation within {limit:g} s: {error}")
        if self._member.id not in {member.id for member in change.generation.members}:
            raise left_out(change)
        return change

    def leave(self) -> None:
        """Report that this member ends well: its connections' end is no loss."""
        self._closing = True
        self._lease.release_all()
        self.line.broadcast(LEAVING, {"member": self._member.id})

    def end_run(self, reason: str, status: int) -> None:
        """End the run on all machines, from any thread; no vote begins any more.

        This machine's supervisor is asked, if it lives: it ends the run already where it has sent
        the signal itself, and then has the reason. Otherwise all processes are asked.

        Args:
            reason: why, a sentence.
            status: the exit status of the run's commands.
        """
        self._ending = True
        self._lease.release_all()
        body: dict[str, Any] = {"text": reason, "status": status}
        supervisor = supervisor_name(self._member.machine)
        if self.line.silence(supervisor) < _ALIVE_S and self.line.send(supervisor, END, body):
            return
        self.line.broadcast(END, body)

    def when_end_is_asked(self, call: Callable[[bool], None]) -> None:
        """Let a request to end the run, of another process, call a function on the line's thread.

        No vote begins any more: the function ends this process within seconds.

        Args:
            call: is given whether this machine's supervisor is connected, and ends its workers.
        """
        self._end_asked = call

    def close(self) -> None:
        """End the control line and its threads."""
        self.line.close()
        self.waits.close()
        self._acceptors.close()

    # Events of the control line.

    def received(self, peer: str, kind: str, body: dict[str, Any], bulk: bytes | bytearray) -> None:
        """Handle a frame."""
        with self._guarded():
            if kind == STORE:
                self._stores.received(peer, body)
            elif kind == VOTE:
                self._vote_message(peer, body)
            elif kind == LEFT:
                self._note_left(peer, body)
            elif kind == PROMISED:
                if body["generation"] == self._generation.id:
                    self._begin_vote()
            elif kind == EXITED:
                self._watch.exited(body["member"], body["how"])
                self._judge_once()
            elif kind == PROGRESS:
                self._note_progress(peer, body)
            elif kind == SUSPECTED and body["generation"] == self._generation.id:
                self._watch.reported(peer, body["members"], body["reasons"])
                self._judge_once()
            elif kind == ACTIVITY:
                self.activities.received(peer, body)
            elif kind == LEAVING:
                self._watch.leavers.add(peer)
                self._lease.release(peer)
            elif kind == END:
                self._end(peer, body)
            elif kind in self._handlers:
                self._handlers[kind].receive(peer, kind, body, bulk)

    def opened(self, peer: str) -> None:
        """Handle a connected peer."""
        with self._guarded():
            self._watch.opened(peer)

    def closed(self, peer: str, reason: str) -> None:
        """Handle the end of a peer's connections."""
        with self._guarded():
            self._stores.lost(peer)
            self._watch.closed(peer)
            self.line.call_later(CLOSED_GRACE_S + _ROUNDING_S, self._judge_once)
            if self._vote is not None and self._watch.grace_seconds:
                self._begin_vote(anew=True)

    # Events of its ballots.

    def answered(self, answer: Answer) -> None:
        """Take an acceptor's answer."""
        with self._guarded():
            if isinstance(answer, Decided):
                self._learn(answer)
            elif self._vote is not None:
                self._vote.receive(answer)

    def decided(self, value: Generation) -> None:
        """Report an outcome, which a ballot of this member decided, to all."""
        message = Decided(generation=self._generation.id, value=value)
        self._acceptors.report(message, self._generation)
        self._learn(message)

    # What follows runs on the line's thread.

    def _on_line(self, function: Callable[[], None]) -> None:
        def run() -> None:
            with self._guarded():
                function()

        self.line.post(run)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Let an error of the block end the wait of the training thread."""
        try:
            yield
        except CommError as error:
            self._fail(error)
        except Exception as error:
            failed = OutsideWorld(f"The membership failed: {type(error).__name__}: {error}.")
            failed.remedy = "Start the same command again."
            self._fail(failed)

    def _fail(self, error: CommError) -> None:
        """End the wait of the training thread with an error."""
        self._lease.end()
        self.waits.fail(error)
        self.waits.interrupt(self._generation, broken=True)

    def _judge(self) -> None:
        """Judge, again and again."""
        with self._guarded():
            self._judge_once()
            self._give_up_without_quorum()
        if not self._closing:
            pause = min(_JUDGE_S, _JUDGE_SHARE * self._options.peer_timeout)
            self.line.call_later(pause, self._judge)

    def _judge_once(self) -> None:
        if not self._began or self._closing:
            return
        silences = {peer: self.line.silence(peer) for peer in self.line.connected()}
        if self._watch.judge(silences, self.activities.working()):
            self._report_suspicions()
            self._begin_vote(anew=True)

    def _report_suspicions(self) -> None:
        """Report which members this one suspects, and which of them don't reach it.

        Those that reach both members suspect one of them. The reasons are for those that know the
        outcome of the vote before they have any evidence.
        """
        body: dict[str, Any] = {
            "generation": self._generation.id,
            "members": self._watch.apart(),
            "reasons": self._watch.reasons(),
        }
        self.line.broadcast(SUSPECTED, body, self._watch.watched)

    def _report(self) -> None:
        """Report this member's progress, again and again."""
        generation, step = self._progress
        body: dict[str, Any] = {
            "generation": self._generation.id,
            "step": step if generation == self._generation.id else 0,
            "number": self._lease.send(),
            "received": self._watch.received(),
        }
        self.line.broadcast(PROGRESS, body, self._watch.watched)
        self._note_progress(self._member.id, body)
        if not self._closing:
            pause = min(_PROGRESS_S, _PROGRESS_SHARE * self._options.peer_timeout)
            self.line.call_later(pause, self._report)

    def _note_progress(self, member: str, body: Mapping[str, Any]) -> None:
        if body["generation"] == self._generation.id:
            self._watch.progressed(member, body["step"], body["number"], body["received"])
            if self._member.id in body["received"]:
                self._lease.confirm(member, body["received"][self._member.id])
                if self._lease.lasts:
                    self._watch.was_stopped = False

    def _leave(self, present: Generation, reason: str, *, timed_out: bool) -> None:
        """Leave a generation: report it, and vote on its successor."""
        if present.id != self._generation.id:  # the successor is decided
            return
        body: dict[str, Any] = {"generation": present.id, "timed_out": timed_out}
        self.line.broadcast(LEFT, body, self._watch.watched)
        self._note_left(self._member.id, body)

    def _note_left(self, member: str, body: Mapping[str, Any]) -> None:
        if body["generation"] != self._generation.id:
            return
        if self._watch.left(member, timed_out=body["timed_out"]):
            self.line.call_later(TIMED_OUT_S, self._judge_once)
        self._begin_vote(TIMED_OUT_S + _EVIDENCE_S if body["timed_out"] else _EVIDENCE_S)

    def _begin_vote(self, delay: float = _EVIDENCE_S, *, anew: bool = False) -> None:
        """Interrupt the present generation, and take part in the vote on its successor."""
        if not self._began or self._ending:
            return
        generation = self._generation
        self.waits.interrupt(generation)
        if self._vote is None:
            self._detected_at = time.monotonic()
            self._vote = Vote(
                generation,
                self._member.id,
                acceptors=self._acceptors,
                watch=self._watch,
                voter=self,
                promise_limit=self._options.peer_timeout,
            )
        elif not anew:
            return
        absent = self._watch.view.absent
        present = [member for member in generation.members if member.id not in absent]
        if present and not generation.in_whole_replicas(present):
            error = without_replica([each.reason for each in self._watch.suspicions.values()])
            if present[0].id == self._member.id:
                print_message(str(error))  # the supervisor reports the first loss alone
            return self._fail(error)
        first = next((one.id for one in generation.members if one.id not in absent), None)
        own = first == self._member.id
        if self._watch.suspicions:
            # Members that are lost together are seldom noticed together. A ballot that didn't wait
            # for the last one's evidence would propose it again, for a generation that can't begin.
            grace = self._watch.grace_seconds
            delay = grace + 2 * _ROUNDING_S if grace else 0.0
        self._vote.propose_in(delay if own else delay + _TURN_S * jitter(1, 2))

    def _end(self, peer: str, body: dict[str, Any]) -> None:
        """Take part in the run's end, and pass the request on to this machine's supervisor.

        The supervisor of a machine without members ends by itself.
        """
        members = {one.id for one in self._generation.members}
        members |= {supervisor_name(machine) for machine in self._generation.machines}
        if self._ending or peer not in members:
            return
        self._ending = True
        self._lease.release_all()
        self._end_asked(self.line.send(supervisor_name(self._member.machine), END, body))

    def _vote_message(self, peer: str, body: Mapping[str, Any]) -> None:
        replied = self._acceptors.reply(peer, body)
        if replied is None or replied[1] is None:
            return
        request, reply = replied
        if isinstance(reply, Decided):
            self._learn(reply)
        elif not isinstance(reply, Refused):
            if request.generation.id == self._generation.id:
                self._begin_vote()
            self._acceptors.announce(request)

    def _learn(self, message: Decided) -> None:
        """Continue with the outcome of a vote."""
        ended = self._generation
        value = message.value
        if not value.descends_from(ended.id):
            return
        self._acceptor.learn(value)
        if self._vote is not None:
            self._vote.end()
            self._vote = None
        remaining = {member.id for member in value.members}
        # The outcome may be the first that this member
        # learns of the vote; its waits still last then.
        self.waits.interrupt(ended, broken=self._member.id not in remaining)
        lost = tuple(member for member in ended.members if member.id not in remaining)
        for member in lost:
            self.line.call_later(_FORGET_S, partial(self.line.forget, member.id))
        now = time.monotonic()
        change = Change(
            generation=value,
            lost=lost,
            left=any(member.id in self._watch.leavers for member in lost),
            # A member that was stopped received no heartbeats
            # either, which says nothing about the link.
            silent=self._watch.are_silent(remaining) and not self._watch.was_stopped,
            causes=tuple(self._watch.cause_of(member.id) for member in lost),
            detected_at=self._detected_at or now,
            decided_at=now,
            mates=self._lost_mates(ended, lost),
        )
        self._detected_at = 0.0
        self._generation = value
        self._acceptors.know(value)
        self._watch.enter(value, self.line.connected())
        if self._member.id in remaining:
            stopped = self._watch.unjudged_seconds > self._options.peer_timeout
            # After a long stop this generation may be over as well: the lease then begins with the
            # first confirmation of a report, and not at once.
            self._lease.enter(remaining, renew=not stopped)
        else:
            self._lease.end()
        self.waits.decide(ended, change)
        if self._member.id not in remaining:
            self._closing = True
        elif self._watch.suspicions:
            self._report_suspicions()
            self._begin_vote(anew=True)

    def _lost_mates(self, ended: Generation, lost: Sequence[Member]) -> tuple[str, ...]:
        """Return why members were lost with which this one had a replica of the model."""
        own = next(r for r, one in enumerate(ended.members) if one.id == self._member.id)
        mates = {ended.members[rank].id for rank in ended.replica_of(own)} - {self._member.id}
        causes = (self._watch.cause_of(member.id) for member in lost if member.id in mates)
        return tuple(cause for cause in causes if cause)

    def _give_up_without_quorum(self) -> None:
        """End the wait for a decision that can't come."""
        vote = self._vote
        if vote is None or self._closing:
            return
        generation = vote.generation
        age = time.monotonic() - vote.began_at
        reached = self._acceptors.reached(generation, self._options.peer_timeout)
        # The witness counts as reached: its thread may still
        # wait for an answer, and has the longer limit.
        lacking = not is_quorum(generation, reached | {WITNESS})
        if age > self._options.peer_timeout and (
            lacking or age > self._options.peer_timeout + self._options.timeout
        ):
            self._fail(
                without_quorum(
                    self._member,
                    f"{len(reached)} of {many(len(generation.machines), 'machine')}",
                    [each.reason for each in self._watch.suspicions.values()],
                    was_stopped=self._watch.was_stopped,
                )
            )
