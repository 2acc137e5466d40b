"""Connects a worker with the others and binds a model to a synchronizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.optim import Optimizer

from paceline.cluster.members import Members
from paceline.comm.communicator import Communicator
from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.config.train import TrainConfig
from paceline.sync.allreduce import AllReduce
from paceline.sync.bucket import Bucket
from paceline.sync.replica import Replica
from paceline.sync.share import Share
from paceline.sync.statistics import RunningStatistics
from paceline.sync.synchronizer import Synchronizer
from paceline.sync.updater import Updater

SYNCHRONIZERS = {"allreduce": AllReduce}


def device_of(config: TrainConfig, local_rank: int) -> torch.device:
    """Return the device of a machine's worker."""
    if config.world.use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    if config.world.gpu_numbers:
        return torch.device("cuda", config.world.gpu_numbers[local_rank])
    if torch.cuda.device_count() == 1:  # a scheduler may show each worker its own only
        return torch.device("cuda", 0)
    return torch.device("cuda", local_rank)


def connect(
    config: TrainConfig, members: Members, store: Store, device: torch.device
) -> Communicator:
    """Connect this worker with all others of its generation; collective.

    Raises:
        CommError: a rank didn't come in time.
    """
    return _connect("steps", config, members, store, device)


def connect_layers(
    config: TrainConfig, members: Members, store: Store, device: torch.device
) -> Communicator | None:
    """Connect the layers that exchange within forward and backward, if there are; collective.

    Raises:
        CommError: a rank didn't come in time.
    """
    if not config.model.sync_bn:
        return None
    return _connect("layers", config, members, store, device)


def replicate(
    model: nn.Module,
    optimizer: Optimizer,
    communicator: Communicator,
    sync: str,
    bucket_mb: float,
    share: Share | None = None,
) -> Replica:
    """Give all ranks rank 0's model and bind it to a synchronizer; collective.

    Args:
        model: the same on all ranks but for its values.
        optimizer: of the model's parameters, or others too.
        communicator: connects the ranks.
        sync: a key of `SYNCHRONIZERS`.
        bucket_mb: a bucket's size in MiB, about.
        share: what the model's SyncBatchNorm layers were made with.

    Raises:
        ConfigError: model or optimizer can't be exchanged.
        CommError: a peer was lost, or silent.
    """

    def make(buckets: Sequence[Bucket]) -> Synchronizer:
        updater, statistics = Updater(optimizer, buckets), RunningStatistics(model)
        return SYNCHRONIZERS[sync](buckets, communicator, updater, statistics)

    size = round(bucket_mb * 2**20)
    return Replica(model, optimizer, communicator, make, bucket_bytes=size, share=share)


def _connect(
    purpose: str, config: TrainConfig, members: Members, store: Store, device: torch.device
) -> Communicator:
    return ProcessGroupCommunicator(
        PrefixStore(f"generation/{members.generation}/{purpose}", store),
        rank=members.rank,
        world_size=members.world_size,
        device=device,
        address=members.address,
        first_timeout=config.world.first_iter_timeout,
        timeout=config.world.timeout,
    )
