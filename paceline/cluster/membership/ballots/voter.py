"""Protocol of a voting member, as far as its ballots report to it."""

from __future__ import annotations

from typing import Protocol

from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.voting.messages import Answer


class Voter(Protocol):
    """Protocol of a member that votes; all calls are made on the control line's thread."""

    def answered(self, answer: Answer) -> None:
        """Take an acceptor's answer to a request of this member."""

    def decided(self, value: Generation) -> None:
        """Take the outcome that a ballot of this member has decided."""
