"""Static membership: ranks whose launcher ends all of them where one is lost: no vote, no witness.

By control lines each rank learns whether the others work outside a step, and so are to be waited
for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from time import monotonic
from typing import Any

from torch._C._distributed_c10d import HashStore, Store

from paceline.cluster.membership.control_line.activities import Activities
from paceline.cluster.membership.control_line.frame_kinds import ACTIVITY, control_secret
from paceline.cluster.membership.control_line.line import ControlLine
from paceline.cluster.membership.evidence import EvidenceOptions
from paceline.cluster.membership.generation import Generation, Group, Member
from paceline.cluster.membership.protocol import FrameHandler, InterruptibleGeneration, Successor
from paceline.cluster.membership.voting.messages import Held
from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.stores.waiting import await_keys
from paceline.comm.peer_activities import NO_PEERS, PeerActivities
from paceline.errors import CommError, Message

_CONNECT_S = 5.0  # a line that can't be reached is no error: its rank's waits aren't extended


class StaticMembership:
    """Membership of a run that ends with the first member that is lost; of one rank, too.

    Args:
        store: the store of the start.
        activities: what the members do in steps and between them.

    Attributes:
        survives: False.
        frames: the membership itself, which sends none.
    """

    survives = False

    def __init__(self, store: Store | None = None, activities: PeerActivities = NO_PEERS) -> None:
        self._store = store or HashStore()
        self.activities = activities
        self.frames = self

    def enter(self, group: Group, waits: InterruptibleGeneration) -> Store:
        """Return the store of the start."""
        return self._store

    def begin(self, generation: Generation) -> str:
        """Return "": no vote begins."""
        return ""

    def next_generation(self, lost: CommError) -> Successor:
        """Raise `lost`: there is no next generation."""
        raise lost

    def poll(self, step: int) -> None:
        """Report nothing."""

    def acknowledge(self, held: Sequence[Held]) -> bool:
        """Return True: no machine promises to end the generation."""
        return True

    def may_write(self, *, wait: bool) -> bool:
        """Return True: no process is expelled."""
        return True

    def require_member(self) -> None:
        """Return: no process is expelled."""

    def leave(self, failure: FailureReport | None = None) -> None:
        """Report nothing: the launcher sees the process's end."""

    def send(
        self, peer: str, kind: str, body: Mapping[str, Any], bulk: bytes | list[memoryview] = b""
    ) -> None:
        """Send nothing."""

    def broadcast(self, kind: str, body: Mapping[str, Any]) -> None:
        """Send nothing."""

    def handle(self, kind: str, handler: FrameHandler) -> None:
        """Ignore the handler: no frame comes."""


class _PeerLine:
    """Control line of one rank, by which it knows what the others do.

    Args:
        group: all ranks.
        options: limits of silence.
        report: prints a line.
    """

    def __init__(
        self, group: Group, options: EvidenceOptions, report: Callable[[Message], object]
    ) -> None:
        self.line = ControlLine(
            name=group.member.id,
            secret=control_secret(group.generation),
            address=group.member.address,
            handler=self,
            tcp_timeout=max(60.0, 2 * options.peer_timeout),
        )
        self.activities = Activities(self.line, group.generation, group.member.id, options, report)

    def received(self, peer: str, kind: str, body: dict[str, Any], bulk: bytes | bytearray) -> None:
        """Handle a frame."""
        if kind == ACTIVITY:
            self.activities.received(peer, body)

    def opened(self, peer: str) -> None:
        """Handle a connected peer."""

    def closed(self, peer: str, reason: str) -> None:
        """Handle the end of a peer's connections: its end is reported by its data's."""

    def close(self) -> None:
        """Report that this rank has left the world, and close the line."""
        self.activities.close()
        self.line.close()


def watch_peers(
    group: Group,
    store: Store,
    resources: ExitStack,
    *,
    options: EvidenceOptions,
    limit: float,
    report: Callable[[Message], object],
) -> StaticMembership:
    """Connect all ranks by control lines, so that each knows what the others do; collective.

    Args:
        group: all ranks, as this one sees them.
        store: the store of the start.
        resources: closes this rank's line.
        options: limits of silence.
        limit: seconds to wait for the other ranks' addresses.
        report: prints a line.
    """
    if group.size == 1:
        return StaticMembership(store)
    peers = _PeerLine(group, options, report)
    resources.callback(peers.close)
    generation = group.generation
    deadline = monotonic() + limit
    connect_members(peers.line, generation, group.member, store, limit)
    peers.line.wait_connected(
        [one.id for one in generation.members],
        max(0.0, min(_CONNECT_S, deadline - monotonic())),
    )
    return StaticMembership(store, peers.activities)


def connect_members(
    line: ControlLine, generation: Generation, member: Member, store: Store, limit: float
) -> None:
    """Let a control line connect to those of all members; collective.

    Args:
        line: this member's.
        generation: the generation of the start.
        member: this process.
        store: the store of the start.
        limit: seconds for all members to come.

    Raises:
        CommTimeout: a member didn't come in time; names it.
    """
    prefix = f"{generation.key_prefix}/control"
    store.set(f"{prefix}/{member.id}", json.dumps([member.address, line.port]))
    keys = {f"{prefix}/{one.id}": rank for rank, one in enumerate(generation.members)}

    def missing_text(missing: list[str]) -> str:
        names = ", ".join(generation.describe(keys[key]) for key in missing)
        return f"{names} didn't connect for heartbeats within {limit:g} s: check its output."

    await_keys(store, list(keys), limit, missing_text)
    for key, one in zip(keys, generation.members, strict=True):
        address, port = json.loads(store.get(key))
        line.expect(one.id, address, port)
