"""The plan of one machine for a run: its number, its workers, and the store of the rendezvous."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from paceline.cluster.environment import read_secret
from paceline.cluster.stores.store_spec import StoreSpec, run_space
from paceline.config.world import WorldConfig


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Plan of one machine for a run: its number, its workers, and the rendezvous store.

    Attributes:
        run_id: the run's name, the same on all machines.
        machine: this machine's number (Caffe2's shard_id).
        machines: the number of machines (Caffe2's num_shards).
        workers: the number of workers to start here.
        rendezvous: address of the run's space in a store that all machines reach; None for a run on
            one machine.
        interfaces: names of the network interfaces to use; if empty, all are used.
        first_iter_timeout: seconds to wait for the other machines at the start.
        timeout: seconds to wait for the other machines after the start.
        idle_timeout: seconds for which a worker may work outside a step while others wait.
        runs_command: whether the workers run the command given to `paceline launch`.
        requires_join: whether it is a failure that the command ends in several workers without
            having joined; otherwise, that is a line.
        begun: whether this machine already took part in the run, with as many epochs; if so, the
            other machines may have finished it.
    """

    run_id: str = "local"
    machine: int = 0
    machines: int = 1
    workers: int = 1
    rendezvous: StoreSpec | None = None
    interfaces: tuple[str, ...] = ()
    first_iter_timeout: float = 1200.0
    timeout: float = 60.0
    idle_timeout: float = 1800.0
    runs_command: bool = False
    requires_join: bool = False
    begun: bool = False

    @classmethod
    def of(cls, world: WorldConfig, *, workers: int) -> Self:
        """Make the plan that the flags ask for.

        Raises:
            ConfigError: `--master` isn't HOST:PORT, or `--secret_file` can't be read.
        """
        run_id = world.run_id or cls.run_id
        names = (name.strip() for name in world.distributed_interfaces.split(","))
        return cls(
            run_id=run_id,
            machine=world.shard_id,
            machines=world.num_shards,
            workers=workers,
            rendezvous=StoreSpec.of(world, run_space(run_id), read_secret(world.secret_file)),
            interfaces=tuple(name for name in names if name),
            first_iter_timeout=world.first_iter_timeout,
            timeout=world.timeout,
            idle_timeout=world.idle_timeout,
        )
