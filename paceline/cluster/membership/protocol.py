"""Protocol of membership: which process may write, and the next generation after a loss.

StaticMembership     another launcher ends all processes with the first
ElasticMembership    the others vote on the next generation, and continue
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from paceline.cluster.membership.generation import Generation, Group
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.cluster.membership.voting.messages import Held
from paceline.cluster.stores.failure_report import FailureReport
from paceline.comm.peer_activities import PeerActivities
from paceline.errors import CommError


@dataclass(frozen=True, kw_only=True)
class Successor:
    """Decision about the next generation: its ranks, and the snapshot from which it continues.

    Attributes:
        group: all its ranks, as this one sees them.
        start: the snapshot from which it continues, which all its ranks hold; None: it continues
            from the durable state.
        lost: the ids of the members that aren't in it.
        causes: why each of them was lost, a sentence; "" where this member has no evidence of it.
        seconds: from the first evidence to the decision.
        detected_at: when the loss was detected, by the machine's monotonic clock; None: by the
            training thread.
        risk: which machine's loss would stop the run from now on, a sentence; "" where there is one
            machine.
    """

    group: Group
    start: SnapshotName | None
    lost: Sequence[str] = ()
    causes: Sequence[str] = ()
    seconds: float = 0.0
    detected_at: float | None = None
    risk: str = ""


class Interruptible(Protocol):
    """Protocol of waits for peers, which another thread ends with an error."""

    def interrupt(self) -> None:
        """End all waits, now and later; from any thread."""


class InterruptibleGeneration(Protocol):
    """Protocol of all waits for peers in a generation, which another thread ends."""

    def interrupt(self, *, broken: bool = False) -> None:
        """End waits, now and later; from any thread.

        Args:
            broken: this process has no further generation, as where its replica of the model is not
                whole any more. Otherwise waits inside the replica may continue.
        """


class FrameHandler(Protocol):
    """Protocol of what handles the frames that other members send."""

    def receive(
        self, peer: str, kind: str, body: Mapping[str, Any], bulk: bytes | bytearray
    ) -> None:
        """Handle a frame, on the control line's thread.

        Args:
            peer: the sender's id.
            kind: of the frame.
            body: what JSON can carry.
            bulk: further bytes.
        """


class Frames(Protocol):
    """Protocol of frames between members, besides those of the membership itself."""

    def send(
        self, peer: str, kind: str, body: Mapping[str, Any], bulk: bytes | list[memoryview] = b""
    ) -> None:
        """Send a frame to a member, which gets it as `FrameHandler.receive` says; from any thread.

        One that can't be sent is dropped. Views of bytes are sent one behind the other, and are
        read until all has left.
        """

    def broadcast(self, kind: str, body: Mapping[str, Any]) -> None:
        """Send a frame to all members of the present generation; from any thread."""

    def handle(self, kind: str, handler: FrameHandler) -> None:
        """Let frames of a kind be handled; those of one sender are handled in their order."""


class Membership(Protocol):
    """Protocol of a membership."""

    @property
    def survives(self) -> bool:
        """Whether a run continues where a member is lost."""

    @property
    def activities(self) -> PeerActivities:
        """What the members do in steps and between them."""

    @property
    def frames(self) -> Frames:
        """What carries further frames between the members."""

    def enter(self, group: Group, waits: InterruptibleGeneration) -> Store:
        """Return a generation's store, once all its members have come; collective.

        Args:
            group: all its ranks, as this one sees them.
            waits: what the loss of a member interrupts, at once where it is known already.

        Raises:
            CommError: a member didn't come, or the generation has ended before.
        """

    def begin(self, generation: Generation) -> str:
        """Vote from now on: the run's first generation has its number.

        Returns:
            which machine's loss would stop the run, a sentence; "" where there is one machine.
        """

    def next_generation(self, lost: CommError) -> Successor:
        """Leave the present generation, and wait for the decision about the next one.

        The vote knows what this member holds by `acknowledge`.

        Args:
            lost: why this member leaves it.

        Raises:
            OutsideWorld: this member isn't in the next generation, or there is none.
            CommError: `lost`, where the run doesn't survive it.
        """

    def poll(self, step: int) -> None:
        """Report that this member is in a step."""

    def acknowledge(self, held: Sequence[Held]) -> bool:
        """Record what this member holds, for votes; return False once its machine has promised."""

    def may_write(self, *, wait: bool) -> bool:
        """Return whether this process is in the world, so that it may write files; any thread.

        Args:
            wait: until that is known; otherwise it returns whether it is known now.
        """

    def require_member(self) -> None:
        """Return if this process may record results of the present generation; waits likewise.

        Raises:
            PeerLost: it may not, because the next generation is being decided, or is.
        """

    def leave(self, failure: FailureReport | None = None) -> None:
        """Report this process's end to the others.

        Args:
            failure: an error that they don't survive, or a signal, which ends the run on all
                machines; None: it has ended well.
        """
