"""One all_reduce by Gloo, over a store and at the address of a `Group`."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.cluster.membership.generation import Group


def sum_of_ranks(group: Group, store: Store) -> float:
    """Return 0 + 1 + … + world_size - 1, as the ranks add it up together."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=30)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=group.address)]
    prefixed = PrefixStore(group.generation.key_prefix, store)
    gloo = dist.ProcessGroupGloo(prefixed, group.rank, group.size, options)
    tensor = torch.tensor(float(group.rank))
    gloo.allreduce([tensor]).wait()
    gloo.barrier().wait()
    return tensor.item()
