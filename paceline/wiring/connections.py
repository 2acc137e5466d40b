"""A worker's connections with the others, and their device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.cluster.membership.generation import Group
from paceline.comm.communicator import Communicator
from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.config.train import TrainConfig
from paceline.replica.trained_parameters import row_sparse_parameters
from paceline.run.generation_context import GenerationContext
from paceline.run.run import Run
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


def make_run(
    config: TrainConfig,
    group: Group,
    store: Store,
    device: torch.device,
    link: MemberLink | None = None,
) -> Run:
    """Connect this worker with all others of its generation; collective.

    Args:
        config: the flags.
        group: all ranks of the generation, as this one sees them.
        store: where its ranks find each other.
        device: this worker's.
        link: interrupts a generation that loses a member, and has the store of later ones;
            without it, they use `store`, too.

    Raises:
        CommError: a rank didn't come in time.
    """

    def contexts(limits: tuple[float, float]) -> Callable[[Group], GenerationContext]:
        def connecting(group: Group, purpose: str) -> Communicator:
            first = group.generation.token == token
            place = store if first or link is None else link.store_of(group)
            return connect(group, purpose, store=place, device=device, limits=limits)

        def make_context(group: Group) -> GenerationContext:
            context = GenerationContext(group, connecting, device=device, limits=limits)
            if link is not None:
                link.attach(context)
            return context

        return make_context

    token = group.generation.token

    first, later = config.world.first_iter_timeout, config.world.timeout
    with ExitStack() as undo:
        context = contexts((first, later))(group)
        run = Run(context=context, make_context=contexts((later, later)), store=store)
        undo.push(run)
        if config.model.sync_bn:
            run.connect(GenerationContext.connect_layers)
        run.connect(partial(connect_machine, device=device, sync=config.sync.sync))
        undo.pop_all()
    return run


def connect(
    group: Group,
    purpose: str,
    *,
    store: Store,
    device: torch.device,
    limits: tuple[float, float],
) -> Communicator:
    """Connect the ranks of a group; collective, once a purpose.

    Args:
        group: the ranks, as this one sees them.
        purpose: distinguishes the connections of a generation.
        store: where ranks find each other; the caller keeps a reference to it.
        device: this worker's.
        limits: seconds to wait for the others, at the start and later.

    Raises:
        CommError: a rank didn't come in time.
    """
    return ProcessGroupCommunicator(
        PrefixStore(f"{group.generation.key_prefix}/{purpose}", store),
        rank=group.rank,
        world_size=group.size,
        device=device,
        address=group.address,
        first_timeout=limits[0],
        timeout=limits[1],
    )


def connect_machine(context: GenerationContext, device: torch.device, sync: str) -> None:
    """Connect the workers of this machine, if their GPUs sum first; collective.

    Raises:
        CommError: a worker didn't come in time.
    """
    if adds_up_on_gpus(context.group, device, sync):
        context.connect_machine()


def connect_replica(context: GenerationContext, device: torch.device, sync: str) -> None:
    """Connect the ranks for one of several exchanges; collective.

    Raises:
        CommError: a rank didn't come in time.
    """
    context.connect_replica(intra_machine=adds_up_on_gpus(context.group, device, sync))


def connect_rows(run: Run, model: nn.Module) -> Callable[[], Communicator | None]:
    """Connect all ranks for a model's row-sparse gradients, if it may have any; collective.

    Returns:
        what returns the connection in the present generation, or None.

    Raises:
        CommError: a rank didn't come in time.
    """
    if not row_sparse_parameters(model):
        return lambda: None
    number = len(run.context.rows)
    run.connect(GenerationContext.connect_rows)
    return lambda: run.context.rows[number]


def adds_up_on_gpus(group: Group, device: torch.device, sync: str) -> bool:
    """Return whether a machine's GPUs sum before one of its workers exchanges; equal on all ranks.

    On one machine alone, `--sync allreduce` is such a sum, and windows share memory.
    """
    workers = group.generation.workers_per_machine
    several = len(workers) > 1 and max(workers) > 1
    return sync == "notified" and device.type == "cuda" and several
