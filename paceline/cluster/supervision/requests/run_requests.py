"""Requests to a run's processes on this machine: stop, and how the run stands.

A record is believed only where the process that it names runs on this machine, and is the one that
holds the socket (SO_PEERCRED). A machine's supervisor is asked first: it ends its workers before
itself. Where it was killed, also while it was asked, each worker is asked. A process that doesn't
answer gets SIGTERM.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.membership.process_identity import ProcessIdentity, ask_kernel
from paceline.cluster.supervision.requests.member_record import MemberRecord, RunProcesses
from paceline.cluster.supervision.requests.run_socket import (
    CLIENT_S,
    Answer,
    Request,
    peer_of,
    receive_all,
    send_all,
)
from paceline.cluster.supervision.requests.run_status import RunStatus
from paceline.errors import CommError

_LONGEST_ANSWER = 2**24  # bytes: the members of the largest run


@dataclass(frozen=True, kw_only=True)
class StopResult:
    """Result of a request to stop.

    Attributes:
        ended: the processes of the run on this machine, which have ended.
        running: those that still ran at the end of the time limit.
        elsewhere: records of processes that aren't this machine's.
        refused: why processes refused, each a sentence with the process's name.
    """

    ended: tuple[MemberRecord, ...]
    running: tuple[MemberRecord, ...]
    elsewhere: tuple[MemberRecord, ...]
    refused: tuple[str, ...] = ()


def stop_run(run: Path, timeout: float) -> StopResult:
    """Ask a run's processes on this machine to end the run, and wait for their end.

    Args:
        run: the run's folder.
        timeout: seconds to wait.
    """
    processes = RunProcesses.of(run)
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        handles = {}
        for record in processes.here:
            handle = _open_process(record)
            if handle is not None:
                stack.callback(os.close, handle)
                handles[record] = handle
        running = dict(handles)
        refused = _ask_to_stop(first_asked(running), handles)
        while not refused and (ended := _await_end(running, deadline)):
            running = {record: handles[record] for record in running if record not in ended}
            killed = {record.machine for record in ended if record.role == "supervisor"}
            orphans = [record for record in running if record.machine in killed]
            # Their supervisor was killed while it ended them.
            refused = _ask_to_stop(orphans, handles)
    return StopResult(
        ended=tuple(record for record in processes.here if record not in running),
        running=tuple(record for record in processes.here if record in running),
        elsewhere=processes.elsewhere,
        refused=tuple(refused),
    )


def ask_status(run: Path) -> tuple[RunStatus, MemberRecord] | None:
    """Ask a run's processes on this machine how the run stands, the workers first.

    Returns:
        the first answer, and the process that gave it; None if none answered.
    """
    records = RunProcesses.of(run).here
    for record in sorted(records, key=lambda record: record.role == "supervisor"):
        with suppress(OSError, CommError):  # it has just ended, or can't answer
            return RunStatus.from_text(ask(record, Request(kind="status")).status), record
    return None


def ask(record: MemberRecord, request: Request) -> Answer:
    """Send a request to a process of this machine; return its answer.

    Raises:
        OSError: the process can't be reached, or didn't answer in time.
        CommError: it refused; the text says why.
    """
    deadline = time.monotonic() + 2 * CLIENT_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(2 * CLIENT_S)
        connection.connect(f"\0{record.socket}")
        # An abstract name is free once its process has ended, and another user may bind it.
        if peer_of(connection)[0] != record.process.pid:
            raise ConnectionRefusedError("the socket is another process's")
        with suppress(BrokenPipeError):  # refused before the request was read; the answer says so
            send_all(connection, request.to_text().encode(), deadline)
        text = receive_all(connection, deadline, _LONGEST_ANSWER)
    if not text:
        raise ConnectionResetError("the process ended before it answered")
    answer = Answer.from_text(text)
    if answer.error:
        raise CommError(answer.error)
    return answer


def first_asked(records: Iterable[MemberRecord]) -> Iterator[MemberRecord]:
    """Yield each machine's supervisor, or its workers where it has none."""
    records = list(records)
    supervised = {record.machine for record in records if record.role == "supervisor"}
    for record in records:
        if record.role == "supervisor" or record.machine not in supervised:
            yield record


def name_of(record: MemberRecord) -> str:
    """Name a process in a sentence."""
    process = record.process
    return f"{record.role} {record.id} (process {process.pid} on {process.host})"


def _ask_to_stop(records: Iterable[MemberRecord], handles: Mapping[MemberRecord, int]) -> list[str]:
    """Ask processes to stop; return why some refused."""
    refused = []
    for record in records:
        try:
            _ask_one_to_stop(record, handles[record])
        except (CommError, PermissionError) as error:
            refused.append(f"{name_of(record)}: {error}")
    return refused


def _ask_one_to_stop(record: MemberRecord, handle: int) -> None:
    """Raise CommError or PermissionError if the process refuses."""
    try:
        ask(record, Request(kind="stop"))
    except OSError:  # its threads don't run, or it is in another network namespace
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGTERM)


def _open_process(record: MemberRecord) -> int | None:
    """Return a descriptor of the process; None if it has ended."""
    try:
        handle = os.pidfd_open(record.process.pid)
    except ProcessLookupError:
        return None
    if ask_kernel(record.process, ProcessIdentity.of_this_process()) != "runs":
        os.close(handle)  # the number is another process's by now
        return None
    return handle


def _await_end(handles: Mapping[MemberRecord, int], deadline: float) -> set[MemberRecord]:
    """Wait for the first ends of processes; return those that ended, none at the deadline."""
    poll = select.poll()
    for handle in handles.values():
        poll.register(handle, select.POLLIN)
    left = deadline - time.monotonic()
    ended = {handle for handle, _ in poll.poll(max(0.0, left * 1000))} if handles else set()
    return {record for record, handle in handles.items() if handle in ended}
