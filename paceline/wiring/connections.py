"""A worker's connections with the others, and their device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.cluster.membership.generation import Group
from paceline.comm.communicator import Communicator
from paceline.comm.peer_activities import NO_PEERS, PeerActivities
from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.comm.single_rank import SingleRankCommunicator
from paceline.config.train import TrainConfig
from paceline.errors import ConfigError, Message
from paceline.generation.context import GenerationContext
from paceline.generation.run import Run
from paceline.replica.state.checksums import name_ranks
from paceline.wiring.membership import MemberLink


def device_of(config: TrainConfig, local_rank: int) -> torch.device:
    """Return the device of a machine's worker."""
    if config.world.use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    if config.world.gpu_numbers:
        return torch.device("cuda", config.world.gpu_numbers[local_rank])
    if torch.cuda.device_count() == 1:  # a scheduler may show each worker its own only
        return torch.device("cuda", 0)
    return torch.device("cuda", local_rank)


def open_run(
    group: Group,
    store: Store,
    device: torch.device,
    limits: tuple[float, float],
    link: MemberLink | None = None,
    activities: PeerActivities = NO_PEERS,
) -> Run:
    """Connect all ranks of a start's first generation, and know how to in later ones; collective.

    Args:
        group: all ranks of the generation, as this one sees them.
        store: where its ranks find each other.
        device: this worker's.
        limits: timeouts in seconds: one for the start and the first step, and one for later steps.
        link: interrupts a generation that loses a member, and has the store of later ones;
            without it, they use `store`, too.
        activities: what the peers do, where there is no link.

    Raises:
        CommError: a rank didn't come in time.
    """
    token = group.generation.token
    if link is not None:
        activities = link.activities

    def make_context(group: Group, limits: tuple[float, float]) -> GenerationContext:
        later = group.generation.token != token
        if later and link is not None:
            link.await_members(group)
        place = link.store_of(group) if later and link is not None else store
        connecting = partial(connect, store=place, limits=limits, activities=activities)
        context = GenerationContext(
            group,
            partial(connecting, device=torch.device("cpu")),
            device=device,
            limits=limits,
            connect_gpus=partial(connecting, device=device),
            activities=activities,
        )
        if link is not None:
            link.attach(context)
        return context

    return Run(
        context=make_context(group, limits),
        make_context=partial(make_context, limits=(limits[1], limits[1])),
        store=store,
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

    Raises:
        CommError: a rank didn't come in time.
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


def refuse_shared_gpu(sharing: Sequence[int], sync: str) -> None:
    """Refuse collectives of gradients where ranks share a GPU.

    Args:
        sharing: ranks that compute on one GPU; () where none do.
        sync: the method.

    Raises:
        ConfigError: they are what the method needs.
    """
    if sharing and sync == "allreduce":
        raise ConfigError(
            flag="sync",
            value=sync,
            rule=f"{name_ranks(sharing)} compute on one GPU, and NCCL connects one rank a GPU",
            remedy=Message("use {--sync} notified or average, or give each rank its own GPU"),
        )


def adds_up_on_gpus(context: GenerationContext, sync: str) -> bool:
    """Return whether a machine's GPUs sum before one of its workers exchanges; equal on all ranks.

    On one machine alone, `--sync allreduce` is such a sum, and windows share memory.
    """
    workers = context.world.generation.workers_per_machine
    several = len(workers) > 1 and max(workers) > 1
    on_gpus = context.device.type == "cuda" and not context.sharing
    return sync == "notified" and on_gpus and several
