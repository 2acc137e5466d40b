"""How a process joins the others of a run: its membership, and the first generation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch._C._distributed_c10d import Store

from paceline.cluster.membership.elastic import EndSignals, join_membership
from paceline.cluster.membership.evidence import EvidenceOptions
from paceline.cluster.membership.generation import Group
from paceline.cluster.membership.protocol import Membership
from paceline.cluster.membership.static import StaticMembership, watch_peers
from paceline.cluster.supervision.worker import declare_survivable
from paceline.errors import Message
from paceline.generation.builder import Builder
from paceline.generation.connector import Connector
from paceline.generation.run import Run


def connect_run(
    group: Group,
    store: Store,
    resources: ExitStack,
    *,
    device: torch.device,
    limits: tuple[float, float],
    survives: bool,
    signals: EndSignals,
    options: EvidenceOptions,
    report: Callable[[Message], object],
) -> Run:
    """Connect a process with all others of its run; collective.

    Args:
        group: all ranks of the start, as this one sees them.
        store: the store of the start.
        resources: closes what is opened.
        device: this process's.
        limits: timeouts in seconds: one for the start and the first step, and one for later steps.
        survives: whether the others continue where a process is lost. Otherwise a launcher ends all
            of them, and each only learns what the others do.
        signals: what ends this process; where the run survives losses, it ends the run on all
            machines.
        options: limits of silence.
        report: prints a line.

    Returns:
        the run, whose generation names the witness if there is one.

    Raises:
        CommError: a process didn't come in time, or can't be reached.
    """
    membership: Membership
    if survives:
        group, membership = join_membership(
            group, store, resources, signals, options=options, limit=limits[0], report=report
        )
    else:
        membership = watch_peers(
            group, store, resources, options=options, limit=limits[0], report=report
        )
    return resources.enter_context(open_run(group, store, device, limits, membership))


def open_run(
    group: Group,
    store: Store,
    device: torch.device,
    limits: tuple[float, float],
    membership: Membership | None = None,
) -> Run:
    """Connect all ranks of a start's first generation, and know how to in later ones; collective.

    Args:
        group: all ranks of the generation, as this one sees them.
        store: the store of the start.
        device: this worker's.
        limits: timeouts in seconds: one for the start and the first step, and one for later steps.
        membership: the run's; None: it ends with the first process that is lost.

    Raises:
        CommError: a rank didn't come in time.
    """
    membership = membership or StaticMembership(store)
    builder = Builder()
    connector = Connector(device=device, limits=limits)
    return Run(
        context=connector.connect(group, membership, builder, first=True),
        connector=connector,
        membership=membership,
        builder=builder,
        store=store,
    )


def begin_votes(run: Run) -> None:
    """Take part in votes from now on: the run's first generation has its number.

    The supervisor learns that the others survive this process, and the run's recorder, which
    machine's loss they wouldn't survive.
    """
    if risk := run.membership.begin(run.context.world.generation):
        run.recorder.event("note", text=risk)
    if run.membership.survives:
        declare_survivable()
