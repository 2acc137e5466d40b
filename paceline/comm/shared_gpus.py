"""Which ranks compute on one GPU: NCCL connects no two ranks of the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.communicator import Communicator, gather_texts


def sharing_ranks(gpus: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks of the first GPU that has several; () where each has one at most.

    Args:
        gpus: for each rank, what names its GPU among those of all machines.
    """
    for gpu in gpus:
        ranks = tuple(rank for rank, other in enumerate(gpus) if other == gpu)
        if len(ranks) > 1:
            return ranks
    return ()


def find_sharing_ranks(communicator: Communicator, device: torch.device) -> tuple[int, ...]:
    """Return what `sharing_ranks` returns for all ranks' devices; collective.

    A GPU's number says little: a process may see one GPU only, as its number 0.
    """
    if device.type != "cuda" or communicator.world_size == 1:
        return ()
    # A device's index depends on CUDA_VISIBLE_DEVICES, which each rank may have its own of.
    own = str(torch.cuda.get_device_properties(device).uuid)
    return sharing_ranks(gather_texts(communicator, own, "the comparison of the ranks' GPUs"))
