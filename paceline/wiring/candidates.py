"""Candidates of `--sync auto`: the table of exchanges that it tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.config.world import SyncConfig
from paceline.reduce.buckets import partition
from paceline.replica.trained_parameters import TrainedParameters

# (method, bucket size in MiB); of those that are equally fast the first is taken. The order is part
# of a run's state: of sizes that make the same buckets the first is recorded, and resumed with.
CANDIDATES = {
    "cpu": (
        *(("notified", 16.0), ("allreduce", 8.0), ("notified", 8.0), ("notified", 4.0)),
        *(("notified", 2.0), ("allreduce", 25.0)),
    ),
    "cuda": (("allreduce", 8.0), ("allreduce", 25.0)),
}
SHARED_GPU = (("notified", 16.0), ("notified", 8.0), ("notified", 4.0), ("notified", 2.0))
CONNECTIONS = 4  # to each peer, a further choice with puts where there are several machines


def candidates_of(
    config: SyncConfig,
    trained: TrainedParameters,
    workers_per_machine: Sequence[int],
    device: torch.device,
    sharing: Sequence[int] = (),
) -> list[SyncConfig]:
    """List the exchanges to choose from: those that fit the options, and differ.

    Args:
        config: the options.
        trained: the trained parameters; bucket sizes that divide them alike are one.
        workers_per_machine: for each machine, its number of ranks.
        device: device of the parameters.
        sharing: ranks that compute on one GPU, which NCCL doesn't connect; () where none do.
    """
    if config.sync != "auto":
        return [config]
    if sum(workers_per_machine) == 1 and config.narrow:  # the only worker owns the masters
        return [replace(config, sync="notified")]
    if sum(workers_per_machine) == 1:
        return [SyncConfig(sync="allreduce", bucket_mb=config.bucket_mb)]
    table = SHARED_GPU if sharing else CANDIDATES[device.type]
    found = [(sync, size, config.connections) for sync, size in table]
    open_choice = config.connections == 0 and config.transport != "nixl"
    if len(workers_per_machine) > 1 and open_choice:
        found += [(*one[:2], CONNECTIONS) for one in found if one[0] == "notified"]
    different: dict[object, SyncConfig] = {}
    for sync, size, connections in found:
        if sync == "allreduce" and config.put_options:
            continue
        fixed = replace(
            config,
            sync=sync,
            bucket_mb=config.bucket_mb or size,
            connections=connections,
        )
        size = fixed.bucket_bytes
        buckets = partition(trained.names, trained.groups, size, trained.row_sparse)
        names = tuple(bucket.names for bucket in buckets)
        different.setdefault((sync, names, connections), fixed)
    return list(different.values())
