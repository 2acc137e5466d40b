"""Groups and runs of a world, as one of its ranks sees them, without a rendezvous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.cluster.membership.generation import Generation, Group
from paceline.comm.communicator import Communicator
from paceline.generation.context import GenerationContext
from paceline.generation.run import Run
from paceline.recorder import NullRecorder, Recorder
from paceline.timeline.timeline import Timeline
from tests.harness.twins.communicator import ThreadGroup


def world_of(
    workers_per_machine: Sequence[int] = (1,),
    rank: int = 0,
    *,
    addresses: Sequence[str] = (),
    hosts: Sequence[str] = (),
    token: str = "token",
    number: int = 0,
) -> Group:
    """Return the group of all ranks of a world, as `rank` sees it.

    Args:
        workers_per_machine: for each machine, its number of workers.
        rank: the rank that sees it.
        addresses: for each machine, its address; by default 127.0.0.1.
        hosts: for each machine, its host name; by default a, b, c, ….
        token: the generation's token.
        number: the generation's number.
    """
    machines = len(workers_per_machine)
    generation = Generation.of_workers(
        workers_per_machine,
        start_id="start",
        token=token,
        addresses=addresses or ("127.0.0.1",) * machines,
        hosts=hosts or [chr(ord("a") + machine) for machine in range(machines)],
    )
    return Group.world(replace(generation, number=number), rank)


def open_context(
    world: Group,
    connect: Callable[[Group, str], Communicator],
    connect_gpus: Callable[[Group, str], Communicator] | None = None,
    **options: Any,
) -> GenerationContext:
    """Return a generation's context, whose ranks `connect` connects; with the context's options."""
    return GenerationContext(world, **options).open(connect, connect_gpus)


def run_of(
    communicator: Communicator | None = None,
    group: Group | None = None,
    recorder: Recorder | None = None,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a constant
    timeline: Timeline | None = None,
) -> Run:
    """Return the run of a rank whose purposes all share one communicator.

    Args:
        communicator: connects all ranks; by default there is one rank.
        group: all ranks; by default they are on one machine.
        recorder: receives what happens; by default nothing does.
        device: where the ranks compute.
        timeline: the rank's; by default one that nothing else has.
    """
    connected = communicator or ThreadGroup(1).communicator(0)
    context = open_context(
        group or world_of((connected.world_size,), connected.rank),
        lambda group, purpose: connected,
        device=device,
        limits=(5.0, 5.0),
        timeline=timeline,
    )
    return Run(context=context, recorder=recorder or NullRecorder())
