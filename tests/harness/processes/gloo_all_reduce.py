"""One all_reduce by Gloo, over a store and at the addresses of `Members`."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.cluster.membership.members import Members


def sum_of_ranks(members: Members, store: Store) -> float:
    """Return 0 + 1 + … + world_size - 1, as the ranks add it up together."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=30)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=members.address)]
    generation = PrefixStore(f"generation/{members.generation}", store)
    group = dist.ProcessGroupGloo(generation, members.rank, members.world_size, options)
    tensor = torch.tensor(float(members.rank))
    group.allreduce([tensor]).wait()
    group.barrier().wait()
    return tensor.item()
