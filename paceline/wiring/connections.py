"""Rules of workers that compute on GPUs, alone or several on one."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import ConfigError, Message
from paceline.generation.context import GenerationContext
from paceline.generation.mesh import Mesh
from paceline.replica.checksums import name_ranks


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


def refuse_divided(sync: str, mesh: Mesh) -> None:
    """Refuse methods whose workers each have the whole model, where stages or tensors divide it.

    Raises:
        ConfigError: the method is one of these.
    """
    if mesh.divided and sync in ("average", "server"):
        raise ConfigError(
            flag="sync",
            value=sync,
            rule="each of its workers trains the whole model, which this world's mesh divides into "
            + " × ".join(f"{mesh.lengths[axis]} ({axis})" for axis in ("stage", "tensor")),
            remedy=Message("use {--sync} allreduce or notified, or leave out {--mesh}"),
        )


def adds_up_on_gpus(context: GenerationContext, sync: str) -> bool:
    """Return whether a machine's GPUs sum before one of its workers exchanges; equal on all ranks.

    On one machine alone, `--sync allreduce` is such a sum, and windows share memory.
    """
    workers = context.world.generation.workers_per_machine
    several = len(workers) > 1 and max(workers) > 1 and not context.mesh.divided
    on_gpus = context.device.type == "cuda" and not context.sharing
    return sync == "notified" and on_gpus and several
