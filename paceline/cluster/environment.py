"""What the environment says: the only reader of environment variables.

A supervisor tells each worker its place by one variable, `PACELINE_WORKER`. Other launchers have
theirs, which their own files read: `torchrun`, `mpirun`, `slurm`. Where several have left their
mark, the innermost counts: torchrun and mpirun are often started inside of a Slurm job.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from paceline.cluster.launchers.launched_process import LaunchedProcess
from paceline.cluster.launchers.mpirun import by_mpirun, read_mpirun
from paceline.cluster.launchers.slurm import by_srun, read_srun
from paceline.cluster.launchers.torchrun import by_hand, by_torchrun, read_torchrun
from paceline.cluster.stores.store_spec import StoreSpec

WORKER_VARIABLE = "PACELINE_WORKER"

# Threads of one tensor operation wait asleep, not spinning: they share the cores with the threads
# that decode images, and a spinning one keeps the one that it waits for from running. Seen: 8 times
# as many images a second on a busy machine.
# torch's store warns wherever an address has no hostname, as on most networks of a few machines.
# Whoever sets the variables themselves is obeyed.
_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE", "TORCH_CPP_LOG_LEVEL": "ERROR"}


_Launcher = tuple[
    Callable[[Mapping[str, str]], bool], Callable[[Mapping[str, str]], LaunchedProcess]
]


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """A worker's place in a run, as its supervisor tells it.

    Attributes:
        run_id: the run's name.
        generation: this start of the run.
        machine: the machine's number (Caffe2's shard_id).
        machines: the number of machines (Caffe2's num_shards).
        local_rank: the worker's number on this machine.
        local_world_size: the number of workers on this machine.
        store: where the world is written, and where process groups meet; may hold a password.
        first_iter_timeout: seconds to wait for the others at the start.
        timeout: seconds to wait for the others afterwards.
        error_file: where to write why the worker failed.
        command: whether the worker is a command that somebody gave to `paceline launch`.
    """

    run_id: str
    generation: str
    machine: int
    machines: int
    local_rank: int
    local_world_size: int
    store: StoreSpec
    first_iter_timeout: float
    timeout: float
    error_file: str
    command: bool = False

    def to_text(self) -> str:
        """Return the variable's value."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read the variable's value."""
        values: dict[str, Any] = json.loads(text)
        return cls(**(values | {"store": StoreSpec(**values["store"])}))


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Who started this process.

    Attributes:
        worker: this process is a worker of one of our supervisors.
        launched: another launcher started it, one of several. Without both it was started alone.
    """

    worker: WorkerEnvironment | None = None
    launched: LaunchedProcess | None = None


# The launchers, the innermost first: how each is known, and who reads what it says.
_LAUNCHERS: tuple[_Launcher, ...] = (
    (by_torchrun, read_torchrun),
    (by_mpirun, read_mpirun),
    (by_srun, read_srun),
    (by_hand, read_torchrun),
)


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the launcher's variables; by default this process's own.

    Raises:
        ConfigError: they contradict each other, or some are missing; names them.
    """
    variables = os.environ if variables is None else variables
    worker = variables.get(WORKER_VARIABLE)
    if worker is not None:
        return Environment(worker=WorkerEnvironment.from_text(worker))
    for started_by, read in _LAUNCHERS:
        if started_by(variables):
            return Environment(launched=read(variables))
    return Environment()


def environment_of(worker: WorkerEnvironment) -> dict[str, str]:
    """Return the environment to start a worker with: this process's, and the worker's place."""
    return {**_DEFAULTS, **os.environ, WORKER_VARIABLE: worker.to_text()}
