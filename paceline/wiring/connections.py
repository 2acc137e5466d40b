"""A worker's connections with the others, and their device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.config.train import TrainConfig
from paceline.errors import ConfigError, Message
from paceline.generation.context import GenerationContext
from paceline.replica.checksums import name_ranks


def device_of(config: TrainConfig, local_rank: int) -> torch.device:
    """Return the device of a machine's worker."""
    if config.world.use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    if config.world.gpu_numbers:
        return torch.device("cuda", config.world.gpu_numbers[local_rank])
    if torch.cuda.device_count() == 1:  # a scheduler may show each worker its own only
        return torch.device("cuda", 0)
    return torch.device("cuda", local_rank)


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
