"""Joins a world, whatever launched this process: reads its variables, finds the others.

    launcher   started by                      rendezvous
    paceline   a supervisor of `paceline`      the store that its environment names
    others     a row of `LAUNCHERS`            the store that `open_rendezvous` returns
    alone      a user                          none: it is the whole world

From there on all is the same: ranks, addresses, a store, a job token, and how to deregister.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, Store

from paceline.cluster.environment import Environment, WorkerEnvironment
from paceline.cluster.launchers.launched_process import LaunchedProcess
from paceline.cluster.launchers.launchers import command_of, to_be_unset
from paceline.cluster.membership.generation import Generation, Group
from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.print_message import print_message
from paceline.cluster.rendezvous.deadline import Deadline
from paceline.cluster.rendezvous.launcher_store import open_rendezvous
from paceline.cluster.rendezvous.process_rendezvous import form_world
from paceline.cluster.stores.store_spec import StoreSpec
from paceline.cluster.stores.waiting import await_keys
from paceline.cluster.supervision.allocator import keep_freed_memory
from paceline.cluster.supervision.process_end import (
    LaunchedEnd,
    ProcessEnd,
    SupervisedEnd,
)
from paceline.cluster.supervision.supervisor_file import SupervisorFileLock
from paceline.cluster.supervision.worker import read_world
from paceline.comm.addresses import loopback
from paceline.errors import ConfigError, Message

_QUIET_S = 10.0  # of a wait for the others: processes of many machines start seconds apart


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Joined world: the group of all ranks and the store, as this process sees them.

    Attributes:
        group: all ranks of this generation.
        store: the store for the rendezvous of process groups; keep a reference to it as long as any
            process group uses it.
        process_end: reports this process's failure, or performs its normal exit.
        launcher: what started the processes: "paceline", "alone" (one process without a launcher),
            or a name in `LAUNCHERS`.
        rendezvous: HOST:PORT of the TCP store through which the processes found each other; "" if
            they used another store.
    """

    group: Group
    store: Store
    launcher: str
    process_end: ProcessEnd
    rendezvous: str = ""

    def from_rank_0(self, name: str, value: str, timeout: float) -> str:
        """Return rank 0's `value`; collective.

        Args:
            name: what it is, the same on all ranks and used once.
            value: what rank 0 gives; the others' isn't used.
            timeout: seconds to wait for rank 0.

        Raises:
            CommTimeout: rank 0 gave nothing.
            PeerLost: another process gave a reason for the run's end.
        """
        key = f"from rank 0/{name}"
        if self.group.rank == 0:
            self.store.set(key, value)
            return value
        self.await_all(
            [key], f"{self.group.generation.describe(0)} didn't report the {name}", timeout
        )
        return self.store.get(key).decode()

    def await_all(self, keys: Sequence[str], timeout_message: str, timeout: float) -> None:
        """Wait for keys in the store.

        Raises:
            CommTimeout: some didn't come in time; its text begins with `timeout_message`.
            PeerLost: another process gave a reason for the run's end.
        """
        await_keys(
            self.store, keys, timeout, lambda missing: f"{timeout_message} within {timeout:g} s."
        )


def join_world(
    environment: Environment,
    *,
    first_iter_timeout: float,
    timeout: float,
    rendezvous: StoreSpec | None = None,
    interface_names: Sequence[str] = (),
) -> Joined:
    """Find the other processes of the world, and this one's rank; collective.

    Args:
        environment: what started the process.
        first_iter_timeout: seconds to wait for the others at the start.
        timeout: seconds that the store's server waits for the others at the end.
        rendezvous: the store that flags name, if they name one.
        interface_names: the network interfaces to use; none: all.

    Raises:
        ConfigError: the launcher's numbers contradict each other, the rendezvous is wrong, or
            multiprocessing started the process to train with others.
        CommError: processes didn't come in time (names them), or can't reach each other.
    """
    keep_freed_memory()
    if environment.worker is not None:
        place = _take_place(environment.worker)
        group, store = read_world(environment.worker)
        return Joined(
            group=group,
            store=store,
            launcher="paceline",
            process_end=SupervisedEnd(environment.worker, place),
        )
    launched = environment.launched
    if launched is None or launched.world_size == 1:
        if environment.refusal:
            raise ConfigError(environment.refusal)
        if environment.note:
            print_message(environment.note)
        return Joined(
            group=Group.world(_alone(), 0),
            store=HashStore(),
            launcher="alone" if launched is None else launched.launcher,
            process_end=ProcessEnd(),
        )
    remedy = Message("check their output, or give a longer {--first_iter_timeout}")
    waits = _LaunchedWaits(launched)
    deadline = Deadline(first_iter_timeout, remedy, waits=waits, quiet=_QUIET_S)
    if environment.note and launched.rank == 0:
        print_message(environment.note)
    server, job_space = open_rendezvous(launched, rendezvous, interface_names, first_iter_timeout)
    world = form_world(job_space, launched, interface_names, deadline)
    world.store.set_timeout(timedelta(seconds=first_iter_timeout))
    return Joined(
        group=world.group,
        store=world.store,
        launcher=launched.launcher,
        rendezvous=job_space.address if job_space.served_by_run else "",
        process_end=LaunchedEnd(
            world, job_space, server, cleans_up=launched.rank == 0, timeout=timeout
        ),
    )


def _take_place(worker: WorkerEnvironment) -> SupervisorFileLock:
    """Take the worker's place in the world, which processes may have one after another.

    All that a worker's command starts has its environment. Two processes that joined by it at once
    would be in two worlds, each with one process of each worker.

    Raises:
        ConfigError: another process has it.
    """
    place = SupervisorFileLock(worker.error_file)
    if place.taken:
        raise ConfigError(
            "paceline.join() was called in two processes that one worker of `paceline launch` "
            f"started (local rank {worker.local_rank} of machine {worker.machine}), and the first "
            "is still in its world: let `paceline launch -n` start all processes, and start none "
            "by multiprocessing, torchrun or mpirun in them."
        )
    return place


class _LaunchedWaits:
    """Report of a start that waits long, under a launcher: one line on each machine.

    With many processes, a line on what each waits for, whenever that changes, would be many lines.

    Args:
        launched: this process.
    """

    def __init__(self, launched: LaunchedProcess) -> None:
        self._launched = launched
        self._reported = launched.local_rank > 0

    def report(self, awaited: str) -> None:
        """Print the line, if it is the first one."""
        if self._reported:
            return
        self._reported = True
        launched = self._launched
        print_message(
            f"waiting for {awaited}: {command_of(launched.launcher)}'s variables say that this "
            f"process is rank {launched.rank} of {launched.world_size}. To train alone, start it "
            f"without them: {to_be_unset(launched.launcher)}"
        )


def _alone() -> Generation:
    """Return the generation of a process that is the whole world."""
    return Generation.of_workers(
        (1,),
        start_id=uuid.uuid4().hex,
        token=secrets.token_hex(16),
        addresses=(loopback(),),
        hosts=(ProcessIdentity.of_this_process().host,),
    )
