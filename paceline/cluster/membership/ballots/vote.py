"""A member's ballots on the successor of one generation, on the control line's thread.

The member with the lowest rank that isn't suspected proposes at once, others after a random delay,
so that ballots rarely compete. A ballot that hasn't decided after a while is followed by a higher
one: messages were lost, or another proposer was faster.
"""

from __future__ import annotations

import secrets
import time

from paceline.cluster.jitter import jitter
from paceline.cluster.membership.ballots.acceptor_links import AcceptorLinks, Voter
from paceline.cluster.membership.control_line.line_thread import Timer
from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.member_watch import MemberWatch
from paceline.cluster.membership.voting.messages import Answer, Ballot, Request
from paceline.cluster.membership.voting.proposer import Proposer, begin, expire, receive

_BALLOT_S = 1.0  # after which a ballot that hasn't decided is followed by another one
_UNSURE_S = 0.1  # before a member asks again whether it is sure whom to suspect
_REFUSED_S = 0.05  # the same, at least, after a refusal
# The members of the next generation authenticate each other by the token: it must not be guessed.
_TOKEN_BYTES = 16


class Vote:
    """Vote on the successor of a generation, as one member takes part in it.

    Args:
        member: the id of this member.
        acceptors: get this member's requests.
        watch: knows what this member knows of the others.
        voter: gets the outcome once, if a ballot of this member decides it.
        promise_limit: seconds after which a quorum of promises suffices.

    Attributes:
        began_at: when this member began to take part, by the monotonic clock.
    """

    def __init__(
        self,
        generation: Generation,
        member: str,
        *,
        acceptors: AcceptorLinks,
        watch: MemberWatch,
        voter: Voter,
        promise_limit: float,
    ) -> None:
        self.generation = generation
        self.began_at = time.monotonic()
        self._member = member
        self._promise_limit = promise_limit
        self._acceptors = acceptors
        self._watch = watch
        self._voter = voter
        self._proposer: Proposer | None = None
        self._highest = 0
        self._timer: Timer | None = None
        self._over = False

    def propose_in(self, seconds: float) -> None:
        """Begin a ballot after some seconds, if nothing is decided before."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._over:
            self._timer = self._acceptors.line.call_later(seconds, self._propose)

    def receive(self, answer: Answer) -> None:
        """Take an acceptor's answer to a request of this member."""
        if self._proposer is not None and not self._over:
            self._follow(*receive(self._proposer, answer))

    def end(self) -> None:
        """Begin no further ballot: the outcome is known."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def _propose(self) -> None:
        late = time.monotonic() - self.began_at > self._promise_limit
        if self._watch.is_unsure and not late:
            # Others may suspect that member already. A generation
            # with it would end as soon as it began.
            self.propose_in(_UNSURE_S)
            return
        if late and self._proposer is not None:
            self._follow(*expire(self._proposer))
        if self._over or (late and self._is_accepting()):
            self.propose_in(_BALLOT_S)
            return
        self._highest += 1
        ballot = Ballot(self._highest, self._member)
        token = secrets.token_hex(_TOKEN_BYTES)
        self.propose_in(_BALLOT_S * jitter(1, 2))
        self._proposer, request = begin(self.generation, ballot, self._watch.view, token=token)
        self._acceptors.ask(request)

    def _is_accepting(self) -> bool:
        """Return whether a request to accept was sent just now, by `expire`."""
        proposer = self._proposer
        return proposer is not None and proposer.phase == "accepting" and not proposer.accepted

    def _follow(self, proposer: Proposer, request: Request | None) -> None:
        before = self._proposer
        self._proposer = proposer
        if proposer.phase == "decided":
            self.end()
            assert proposer.value is not None
            self._voter.decided(proposer.value)
        elif proposer.phase == "refused" and (before is None or before.phase != "refused"):
            assert proposer.highest is not None
            self._highest = max(self._highest, proposer.highest.number)
            # Proposers that paused equally long would refuse each other again.
            self.propose_in(jitter(_REFUSED_S, 6 * _REFUSED_S))
        elif request is not None:
            self._acceptors.ask(request)
