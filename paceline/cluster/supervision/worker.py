"""A worker's side of its supervisor: reading the world, ending with it, reporting why it failed.

The worker's standard input is a pipe that only its supervisor holds open. A thread reads it; at its
end the supervisor is gone, however it went, and the worker kills its own process group: nothing is
orphaned, whatever the main thread waits for. A worker that has called `declare_survivable`
continues where its supervisor was killed (`parent_death_watchdog`); `paceline stop RUN` ends it.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from torch._C._distributed_c10d import Store

from paceline.cluster.environment import WorkerEnvironment, worker_environment
from paceline.cluster.membership.generation import Generation, Group, joins_key
from paceline.cluster.print_message import print_message
from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.stores.store_spec import open_store
from paceline.cluster.supervision.allocator import keep_freed_memory
from paceline.cluster.supervision.parent_death_watchdog import (
    continue_at_end_of_parent,
    watch_parent,
)
from paceline.cluster.supervision.supervisor_file import (
    SupervisorFileLock,
    is_open,
    process_of,
    write_supervisor_file,
)
from paceline.cluster.supervision.survival_mark import declare


def run_worker(
    environment: WorkerEnvironment,
    work: Callable[[Group, Store], None],
    run: Path | None = None,
) -> None:
    """Do a worker's work, and end the process with a report to the supervisor if it fails.

    A worker that fails or was stopped ends at once, without the interpreter's shutdown: threads
    and process groups that wait for lost peers must not keep its supervisor waiting.

    Args:
        environment: the worker's rank and machine, and the run's store.
        work: called with the group of all ranks and the store.
        run: the run's folder, as the user names it, for a message; None: it has none.
    """
    end_with_supervisor(lambda: report_lost_supervisor(environment, run))
    keep_freed_memory()
    try:
        work(*read_world(environment))
    except SystemExit as stop:  # by a signal; the run's state is saved
        end_process(int(stop.code or 0))
    except BaseException as error:
        end_process(report_error(environment, error))


def read_world(environment: WorkerEnvironment) -> tuple[Group, Store]:
    """Open the run's store; return the group of all ranks and the store.

    A script may join, close its world and join again: each join has a token of its own.

    Keep the store for as long as a process group uses it: C++ doesn't keep a store written in
    Python alive.

    Raises:
        CommError: the store can't be reached.
    """
    store = open_store(environment.store, timedelta(seconds=environment.first_iter_timeout))
    machine = environment.machine
    local_rank = environment.local_rank
    formed = Generation.from_text(store.get(f"formed/{machine}"))
    join = store.add(joins_key(machine, local_rank), 1) - 1
    generation = formed.with_token_of_join(join)
    return Group.world(generation, generation.rank_of(machine, local_rank)), store


def report_error(environment: WorkerEnvironment, error: BaseException) -> int:
    """Write down for the supervisor why this worker fails; return the exit status to end with.

    A worker whose supervisor was killed prints it, and so does a second process of a worker, of
    which the first one has joined: the file is for the first one's report.
    """
    failure = FailureReport.of(error)
    if SupervisorFileLock(environment.error_file).taken:
        print_message(failure.text)
        return failure.status
    try:
        write_supervisor_file(environment.error_file, failure.to_text())
    except OSError:
        print_message(failure.text)
    return failure.status


def declare_survivable() -> None:
    """Declare that this worker's world survives the loss of a process.

    From here on the worker outlives its supervisor and its wrapper, and its supervisor lets the
    other workers continue without it. Without a supervisor of Paceline, nothing changes.
    """
    _declare(closed=False)


def declare_closed() -> None:
    """Declare that this worker has closed its world, and ends well."""
    _declare(closed=True)


def _declare(*, closed: bool) -> None:
    environment = worker_environment()
    if environment is not None and environment.survival_mark:
        with suppress(OSError):  # the supervisor has ended
            declare(environment.survival_mark, closed=closed)


def is_orphaned(environment: WorkerEnvironment) -> bool:
    """Return whether this worker's supervisor was killed."""
    return not is_open(environment.survival_mark)


def report_stop(number: signal.Signals, *, consequence: bool = False) -> None:
    """Write down for the supervisor, if there is one, that a signal stops this worker.

    Args:
        consequence: another process of the run is stopped, and reports why.
    """
    environment = worker_environment()
    if environment is not None:
        failure = replace(FailureReport.of_signal(number), consequence=consequence)
        with suppress(OSError):  # the supervisor has ended
            write_supervisor_file(environment.error_file, failure.to_text())


def end_with_supervisor(lost: Callable[[], None] = lambda: None) -> None:
    """Kill this worker and its children as soon as its supervisor is gone, unless it survives.

    Args:
        lost: called in another thread where the supervisor was killed and this worker continues.
    """
    continue_at_end_of_parent()
    # The pipe moves away from standard input, so that no child inherits it and no script reads it.
    supervisor = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(
        target=watch_parent,
        args=(supervisor, lost, _report_end_with_supervisor),
        name="parent-death watchdog",
        daemon=True,
    ).start()


def report_lost_supervisor(environment: WorkerEnvironment, run: Path | None) -> None:
    """Print that the supervisor was killed, once a machine: the first process that comes does.

    Args:
        run: the run's folder, as the user names it; None: it has none.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The kernel gives an abstract name to one process, and takes it back at its end.
        claim.bind(f"\0paceline-orphans-{environment.start_id}-{environment.machine}")
    except OSError:  # another process of the machine has the name
        claim.close()
        return
    claim.detach()  # the name is this process's until its end
    remedy = "" if run is None else f" End the run with `paceline stop {shlex.quote(str(run))}`."
    print_message(
        f"the supervisor of machine {environment.machine} was killed; its workers continue.{remedy}"
    )


@contextmanager
def reporting_lost_supervisor(run: Path | None) -> Iterator[None]:
    """Report in the block that this script's supervisor was killed, as `report_lost_supervisor`.

    A script's standard input is not its supervisor's pipe, which its wrapper reads. So a thread
    waits for the supervisor's end. Without a supervisor of Paceline, nothing is reported.

    Args:
        run: the run's folder, as the user names it; None: it has none.
    """
    environment = worker_environment()
    if environment is None or not environment.survival_mark:
        yield
        return
    try:
        supervisor = os.pidfd_open(process_of(environment.survival_mark))
    except OSError:  # it was killed just now
        report_lost_supervisor(environment, run)
        yield
        return
    block = os.eventfd(0, os.EFD_CLOEXEC)

    def watch() -> None:
        if supervisor in select.select([supervisor, block], [], [])[0]:
            report_lost_supervisor(environment, run)

    thread = threading.Thread(target=watch, name="supervisor watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(block, 1)
        thread.join()
        os.close(block)
        os.close(supervisor)


def _report_end_with_supervisor() -> None:
    environment = worker_environment()
    if environment is not None and environment.local_rank == 0:  # once a machine
        print_message(
            f"the supervisor of machine {environment.machine} was killed before the run could "
            "outlive it: start the same command again."
        )


def end_process(status: int) -> NoReturn:
    """End the process at once, without the interpreter's shutdown; streams may be closed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as after `>&-`
            with suppress(OSError, ValueError):
                stream.flush()
    os._exit(status)
