"""Connections of a run's first generation."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import Store

from paceline.cluster.membership.generation import Group
from paceline.cluster.membership.protocol import Membership
from paceline.cluster.membership.static import StaticMembership
from paceline.generation.builder import Builder
from paceline.generation.connector import Connector
from paceline.generation.notes import Notes
from paceline.generation.run import Run


def connect_run(
    group: Group,
    store: Store,
    device: torch.device,
    limits: tuple[float, float],
    membership: Membership | None = None,
    notes: Notes | None = None,
) -> Run:
    """Connect all ranks of a start's first generation; collective. The run connects later ones.

    Args:
        group: all ranks of the generation, as this one sees them.
        store: the store of the start.
        device: this worker's.
        limits: timeouts in seconds: one for the start and the first step, and one for later steps.
        membership: the run's; None: it ends with the first process that is lost.
        notes: shows what the user is to know; None: as `paceline train` does.
    """
    membership = membership or StaticMembership(store)
    builder = Builder()
    connector = Connector(device=device, limits=limits)
    return Run(
        context=connector.connect(group, membership, builder, first=True),
        connector=connector,
        membership=membership,
        builder=builder,
        notes=notes or Notes(),
        store=store,
    )
