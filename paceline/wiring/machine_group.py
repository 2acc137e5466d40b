"""Connects the workers of one machine, where their GPUs add up before one of them exchanges."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.cluster.membership.members import Members
from paceline.comm.communicator import Communicator
from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.comm.single_rank import SingleRankCommunicator


def adds_up_on_gpus(members: Members, device: torch.device, sync: str) -> bool:
    """Tell whether a machine's GPUs add up before one of its workers exchanges; alike on all ranks.

    On one machine alone, collectives are what `--sync allreduce` is; windows share memory there.
    """
    several = len(members.machines) > 1 and max(members.machines) > 1
    return sync == "notified" and device.type == "cuda" and several


def connect_machine(
    members: Members, store: Store, device: torch.device, limits: tuple[float, float], sync: str
) -> Communicator | None:
    """Connect the workers of this machine, if their GPUs add up first; as `connect_group`."""
    if not adds_up_on_gpus(members, device, sync):
        return None
    return connect_group(members, store, device, limits)


def connect_group(
    members: Members, store: Store, device: torch.device, limits: tuple[float, float]
) -> Communicator:
    """Connect the workers of this machine; collective.

    A first sum makes what later ones need on GPUs while nothing else runs there.

    Args:
        members: the world.
        store: where workers find each other; fresh in this generation.
        device: this worker's.
        limits: seconds to wait for the others, at the start and later.

    Raises:
        CommError: a worker didn't come in time.
    """
    if members.local_world_size == 1:
        return SingleRankCommunicator()
    intra_machine = ProcessGroupCommunicator(
        PrefixStore(f"generation/{members.generation}/machine/{members.machine}", store),
        rank=members.local_rank,
        world_size=members.local_world_size,
        device=device,
        address=members.address,
        first_timeout=limits[0],
        timeout=limits[1],
    )
    first, what = torch.ones(1, device=device), "the first sum of this machine's workers"
    intra_machine.reduce(first).wait(what)
    intra_machine.broadcast(first).wait(what)
    assert first.tolist() == [members.local_world_size]
    return intra_machine
