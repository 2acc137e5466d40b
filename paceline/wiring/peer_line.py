"""Control line among ranks whose launcher ends all of them where one is lost: no vote, no witness.

By it each rank learns whether the others work outside a step, and so are to be waited for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic
from typing import Any

from torch._C._distributed_c10d import Store

from paceline.cluster.membership.control_line.activities import Activities
from paceline.cluster.membership.control_line.frame_kinds import ACTIVITY, control_secret
from paceline.cluster.membership.control_line.line import ControlLine
from paceline.cluster.membership.evidence import EvidenceOptions
from paceline.cluster.membership.generation import Generation, Group, Member
from paceline.cluster.stores.waiting import await_keys
from paceline.cluster.supervision.supervisor import print_message
from paceline.comm.peer_activities import NO_PEERS, PeerActivities
from paceline.errors import Message

_CONNECT_S = 5.0  # a line that can't be reached is no error: its rank's waits aren't extended


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
    report: Callable[[Message], object] = print_message,
) -> PeerActivities:
    """Connect all ranks by control lines; return what the ranks do. Collective.

    Args:
        group: all ranks, as this one sees them.
        store: the store of the start.
        resources: closes this rank's line.
        options: limits of silence.
        limit: seconds to wait for the other ranks' addresses.
        report: prints a line.

    Raises:
        CommError: a rank didn't come in time.
    """
    if group.size == 1:
        return NO_PEERS
    peers = _PeerLine(group, options, report)
    resources.callback(peers.close)
    generation = group.generation
    deadline = monotonic() + limit
    connect_members(peers.line, generation, group.member, store, limit)
    peers.line.wait_connected(
        [one.id for one in generation.members],
        max(0.0, min(_CONNECT_S, deadline - monotonic())),
    )
    return peers.activities


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
