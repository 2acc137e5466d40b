"""Connector: how the ranks of a generation find and reach each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.cluster.membership.generation import Group
from paceline.cluster.membership.protocol import Membership
from paceline.comm.communicator import Communicator
from paceline.comm.peer_activities import NO_PEERS, PeerActivities
from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.comm.single_rank import SingleRankCommunicator
from paceline.generation.builder import Builder
from paceline.generation.context import GenerationContext
from paceline.timeline.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Connector:
    """Connector of one rank with the others, over Gloo, and over NCCL where each has a GPU.

    Attributes:
        device: this rank's.
        limits: timeouts in seconds: one for the start and the first step, and one for later steps.
        timeline: this rank's, for all generations.
    """

    device: torch.device
    limits: tuple[float, float]
    timeline: Timeline = field(default_factory=Timeline)

    def connect(
        self, group: Group, membership: Membership, builder: Builder, *, first: bool = False
    ) -> GenerationContext:
        """Connect the ranks of a generation; collective.

        Args:
            group: all its ranks, as this one sees them.
            membership: has its store, and interrupts what waits for a lost member.
            builder: has its mesh.
            first: whether it is the first of the start, whose processes may come late.
        """
        limits = self.limits if first else (self.limits[1], self.limits[1])
        context = GenerationContext(
            group,
            device=self.device,
            limits=limits,
            activities=membership.activities,
            mesh=builder.mesh(group.generation),
            timeline=self.timeline,
        )
        connecting = partial(
            connect,
            store=membership.enter(group, context),
            limits=limits,
            activities=membership.activities,
        )
        return context.open(
            partial(connecting, device=torch.device("cpu")),
            partial(connecting, device=self.device),
        )


def connect(
    group: Group,
    purpose: str,
    *,
    store: Store,
    device: torch.device,
    limits: tuple[float, float],
    activities: PeerActivities = NO_PEERS,
) -> Communicator:
    """Connect the ranks of a group; collective, once a purpose.

    Args:
        group: the ranks, as this one sees them.
        purpose: distinguishes the connections of a generation.
        store: where ranks find each other; the caller keeps a reference to it.
        device: where the tensors are that travel.
        limits: seconds to wait for the others, at the start and later.
        activities: what the others do.
    """
    if group.size == 1:
        return SingleRankCommunicator()
    return ProcessGroupCommunicator(
        PrefixStore(f"{group.generation.key_prefix}/{purpose}", store),
        rank=group.rank,
        world_size=group.size,
        device=device,
        address=group.address,
        first_timeout=limits[0],
        timeout=limits[1],
        activities=activities,
    )
