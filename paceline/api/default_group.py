"""Torch's default process group, for libraries that look for it, as metrics libraries do."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from paceline.cluster.join import Joined
from paceline.cluster.print_message import print_message
from paceline.errors import ConfigError
from paceline.session.session import Session


def require_none() -> None:
    """Raise ConfigError if there is a default group already."""
    if dist.is_initialized():
        raise ConfigError(
            "default_group=True was given, but torch.distributed.init_process_group() has been "
            "called: remove that call, or leave out default_group."
        )


def open_default_group(session: Session, joined: Joined) -> None:
    """Make torch's default group of all ranks until the world ends; collective.

    It is of Gloo for tensors of CPUs; and of NCCL, too, for those of GPUs, where each rank has its
    GPU. Its operations have `idle_timeout` as their limit.
    """
    context = session.run.context
    backend = "gloo"
    if session.device.type == "cuda" and not context.sharing:
        backend = "cpu:gloo,cuda:nccl"
    group = context.world
    dist.init_process_group(
        backend,
        store=PrefixStore(f"{group.generation.key_prefix}/default", joined.store),
        rank=group.rank,
        world_size=group.size,
        timeout=timedelta(seconds=session.silence.idle_timeout),
    )
    session.resources.callback(_close)
    if group.rank == 0 and group.size > 1 and joined.launcher == "paceline":
        print_message(
            "with default_group=True the loss of a rank ends the run, because torch's default "
            "group can't continue without it: the same command then resumes the run, if it has a "
            "run folder."
        )


def _close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
