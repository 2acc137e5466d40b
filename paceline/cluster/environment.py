"""The only access to `os.environ`; launchers' readers get the variables as an argument.

A supervisor describes each worker by one variable, `PACELINE_WORKER`. Other launchers have
variables of their own, see `launchers`. `PACELINE_SECRET` is the secret of a run's machines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.json_record import JsonRecord
from paceline.cluster.launchers.apart import spawned_refusal
from paceline.cluster.launchers.launched_process import LaunchedProcess
from paceline.cluster.launchers.launchers import command_of, launched_by, note_on, unread_by
from paceline.cluster.stores.store_spec import StoreSpec
from paceline.errors import ConfigError

SECRET_VARIABLE = "PACELINE_SECRET"
WORKER_VARIABLE = "PACELINE_WORKER"

# Threads of one tensor operation sleep while they wait. Spinning threads would take the cores from
# the threads that decode images, and from those that they wait for. Measured: 8 times as many
# images a second on a busy machine.
# torch's store warns wherever an address has no hostname, as on most networks of a few machines.
# Variables that the user sets are kept.
_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment(JsonRecord):
    """Worker environment: what a supervisor passes to a worker, such as its machine and local rank.

    Attributes:
        run_id: the run's name.
        start_id: the random id of this start of the run.
        machine: the machine's number (Caffe2's shard_id).
        store: address of the store that records the start's membership and serves the
            rendezvous of process groups; may hold a password.
        first_iter_timeout: seconds to wait for the other workers at the start.
        timeout: seconds to wait for the other workers after the start.
        idle_timeout: seconds for which a worker may work outside a step while others wait.
        error_file: path of the file to which the worker writes why it failed.
        survival_mark: path of the worker's survival mark; "" where nothing reads one.
        runs_command: whether the worker runs the command given to `paceline launch`.
    """

    run_id: str
    start_id: str
    machine: int
    local_rank: int
    store: StoreSpec
    first_iter_timeout: float
    timeout: float
    error_file: str
    survival_mark: str = ""
    runs_command: bool = False
    idle_timeout: float = 1800.0


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Environment of this process: what started it (a supervisor, a launcher, or a user).

    Attributes:
        worker: the worker environment, if a Paceline supervisor started this process; else None.
        launched: the launcher's description of this process, if a launcher other than Paceline
            started it as one of several; else None.
        interactive: whether the process is a user's interactive interpreter, such as a notebook's
            kernel, which must outlive an error and an interrupt.
        note: a note for the user on a process that may train alone without meaning to; or "".
        refusal: why the process must not be a world of its own, a sentence; or "".
    """

    worker: WorkerEnvironment | None = None
    launched: LaunchedProcess | None = None
    interactive: bool = False
    note: str = ""
    refusal: str = ""


_was_read = False  # by this process: it has joined, or starts workers


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the launcher's variables; by default this process's own.

    Raises:
        ConfigError: they contradict each other, some are missing, or they are of a launcher that
            isn't supported; names them.
    """
    global _was_read
    _was_read = True
    variables = os.environ if variables is None else variables
    worker = worker_environment(variables)
    launched = None if worker else launched_by(variables)
    return Environment(
        worker=worker,
        launched=launched,
        note="" if worker else note_on(variables, launched),
        refusal="" if worker else spawned_refusal(),
        interactive=worker is None and is_interactive(),
    )


def is_interactive() -> bool:
    """Return whether this process is an interactive interpreter."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def note_at_exit() -> str:
    """Return a note on a process that ends without having joined the others of its launcher; or "".

    Under `paceline launch` the supervisor says so, and of other launchers' processes rank 0.
    """
    if _was_read or WORKER_VARIABLE in os.environ:
        return ""
    with suppress(ConfigError):
        launched = launched_by(os.environ)
        # Rank 0 alone says it: the other processes would repeat the line.
        if launched is not None and launched.world_size > 1 and launched.rank == 0:
            return (
                f"this process ended without paceline.join(): {command_of(launched.launcher)} "
                f"started {launched.world_size} processes, and each worked as if it were the only "
                "one. Call paceline.join() in the script."
            )
    return ""


def note_for_supervisor(machines: int, workers: int) -> str:
    """Return a note on supervisors that a launcher started as several, and that know of one; or "".

    Args:
        machines: the number of the run's machines, each of which has a supervisor.
        workers: the number of workers of this machine.
    """
    launched = None
    with suppress(ConfigError):  # a supervisor doesn't need these variables
        launched = launched_by(os.environ)
    if launched is not None and launched.world_size > machines:
        command = command_of(launched.launcher)
        size = launched.world_size
        return (
            f"{command} started this command {size} times, and each starts a run of its own, of "
            f"{machines * workers} in all. To train together, start the script itself by "
            f"{command}, or give --num_shards {size}, and each command its --shard_id."
        )
    if machines == 1 and (sentence := unread_by(os.environ)):
        return sentence
    return note_on(os.environ, launched) if machines * workers == 1 else ""


def worker_environment(variables: Mapping[str, str] = os.environ) -> WorkerEnvironment | None:
    """Return what this process's supervisor gave it; None if it has none."""
    text = variables.get(WORKER_VARIABLE)
    return None if text is None else WorkerEnvironment.from_text(text)


def read_secret(file: str = "") -> str:
    """Return the secret of a run's machines: the file's text, else `PACELINE_SECRET`, else "".

    Raises:
        ConfigError: the file can't be read, or is empty.
    """
    if not file:
        return os.environ.get(SECRET_VARIABLE, "").strip()
    try:
        secret = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't text"
        secret = ""
        rule = f"can't be read ({reason})"
    else:
        rule = "is empty"
    if not secret:
        remedy = "give a file with the same secret on all machines"
        raise ConfigError(flag="secret_file", value=file, rule=rule, remedy=remedy)
    return secret


def environment_of(worker: WorkerEnvironment) -> dict[str, str]:
    """Return the variables to start a worker with: this process's, and the worker's own."""
    return {**_DEFAULTS, **os.environ, WORKER_VARIABLE: worker.to_text()}
