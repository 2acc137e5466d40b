"""What the environment says: the only reader of environment variables.

A supervisor tells each worker its place by one variable, `PACELINE_WORKER`. Other launchers
(torchrun, mpirun, Slurm) have theirs: each gets a reader here and a field in `Environment`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from paceline.cluster.store import StoreSpec

WORKER_VARIABLE = "PACELINE_WORKER"

# Threads of one tensor operation wait asleep, not spinning: they share the cores with the threads
# that decode images, and a spinning one keeps the one that it waits for from running. Seen: 8 times
# as many images a second on a busy machine. Whoever sets the variable themselves is obeyed.
_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """A worker's place in a run, as its supervisor tells it.

    Attributes:
        run_id: the run's name.
        incarnation: this start of the run.
        machine: the machine's number (Caffe2's shard_id).
        machines: the number of machines (Caffe2's num_shards).
        local_rank: the worker's number on this machine.
        local_world_size: the number of workers on this machine.
        store: where the world is written, and where process groups meet; may hold a password.
        first_iter_timeout: seconds to wait for the others at the start.
        timeout: seconds to wait for the others afterwards.
        error_file: where to write why the worker failed.
    """

    run_id: str
    incarnation: str
    machine: int
    machines: int
    local_rank: int
    local_world_size: int
    store: StoreSpec
    first_iter_timeout: float
    timeout: float
    error_file: str

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
    """

    worker: WorkerEnvironment | None = None


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the launcher's variables; by default this process's own."""
    variables = os.environ if variables is None else variables
    worker = variables.get(WORKER_VARIABLE)
    return Environment(worker=None if worker is None else WorkerEnvironment.from_text(worker))


def environment_of(worker: WorkerEnvironment) -> dict[str, str]:
    """Return the environment to start a worker with: this process's, and the worker's place."""
    return {**_DEFAULTS, **os.environ, WORKER_VARIABLE: worker.to_text()}
