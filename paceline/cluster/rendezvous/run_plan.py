"""What one machine brings to a run, and where the run meets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from paceline.cluster.stores.store_spec import StoreSpec, run_space
from paceline.cluster.stores.tcp_store import split_address
from paceline.config.world import WorldConfig


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One machine's part in a run.

    Attributes:
        run_id: the run's name, the same on all machines.
        machine: this machine's number (Caffe2's shard_id).
        machines: the number of machines (Caffe2's num_shards).
        workers: the number of workers to start here.
        meeting: the run's space in a store that all machines reach; None: this machine alone.
        interfaces: network interfaces to use; none: all.
        first_iter_timeout: seconds to wait for the others at the start.
        timeout: seconds to wait for the others afterwards.
        command: whether the workers are a command that somebody gave to `paceline launch`.
        begun: whether this machine was in the run before, which may be finished elsewhere.
    """

    run_id: str = "local"
    machine: int = 0
    machines: int = 1
    workers: int = 1
    meeting: StoreSpec | None = None
    interfaces: tuple[str, ...] = ()
    first_iter_timeout: float = 1200.0
    timeout: float = 60.0
    command: bool = False
    begun: bool = False

    @classmethod
    def of(cls, world: WorldConfig, *, workers: int) -> Self:
        """Make the plan that the flags ask for.

        Raises:
            ConfigError: `--master` isn't HOST:PORT.
        """
        run_id = world.run_id or cls.run_id
        names = (name.strip() for name in world.distributed_interfaces.split(","))
        return cls(
            run_id=run_id,
            machine=world.shard_id,
            machines=world.num_shards,
            workers=workers,
            meeting=_meeting(world, run_space(run_id)),
            interfaces=tuple(name for name in names if name),
            first_iter_timeout=world.first_iter_timeout,
            timeout=world.timeout,
        )


def _meeting(world: WorldConfig, space: str) -> StoreSpec | None:
    if world.file_store_path:
        path = str(Path(world.file_store_path).absolute())
        return StoreSpec(kind="folder", address=path, space=space)
    if world.redis_url:
        return StoreSpec(kind="redis", address=world.redis_url, space=space)
    if world.redis_host:
        url = f"redis://{world.redis_host}:{world.redis_port}/0"
        return StoreSpec(kind="redis", address=url, space=space)
    if world.master:
        split_address(world.master)
        return StoreSpec(kind="tcp", address=world.master, space=space)
    return None
