"""The fork server as the training process sees it: started, asked for decode processes, ended."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from paceline.data.decoding.chunk_queue import ChunkQueue
from paceline.data.decoding.decode_chunks import Maker
from paceline.data.decoding.fork_server import BOOT, ServerSetup
from paceline.errors import DataError

_END_S = 1.0  # within which the killed server ends, when the run does
_KILLED_S = 10.0  # within which the kernel ends a killed process, unless a disk hangs


@dataclass(frozen=True)
class Ended:
    """Report that a decode process has ended.

    Attributes:
        process: its process id, or 0.
        status: its exit status, or minus the signal that killed it; None: unknown, because the
            server ended too.
    """

    worker: int
    process: int
    status: int | None

    def __str__(self) -> str:
        if self.status is None:
            return "ended with its server"
        if self.status < 0:
            return f"was killed by {signal.Signals(-self.status).name}"
        return f"ended with status {self.status}"


class ServerProcess:
    """Running fork server and its decode processes.

    Args:
        ring: the descriptor of the buffers' memory.
        reports: the socket to which decode processes send reports.
        makers: the sample makers, by number.

    Attributes:
        process: the server's own process; killed, it reports no end, and its children end, too.
        has_ended: whether `ended` has found that the server's process has ended.
        processes: process ids of decode processes that run, by worker.
        socket: socket that becomes readable when `ended` has something to return.
    """

    def __init__(
        self, queue: ChunkQueue, ring: int, reports: socket.socket, makers: Sequence[Maker]
    ) -> None:
        self.processes: dict[int, int] = {}
        self.has_ended = False
        self._requested: set[int] = set()
        self.socket, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = ServerSetup(
            makers=tuple(makers), queue=queue.descriptors, ring=ring, reports=reports.fileno()
        )
        # A file, since the server reads it only once it has imported what it needs.
        file = os.memfd_create("paceline-makers", os.MFD_CLOEXEC)
        try:
            with open(file, "wb", closefd=False) as written:
                pickle.dump(setup, written)
            os.lseek(file, 0, os.SEEK_SET)
            argument = json.dumps([requests.fileno(), file, os.getpid(), sys.path])
            self.process = subprocess.Popen(
                # A fresh interpreter: a fork of the training
                # process would have its threads' locks and its GPU.
                [sys.executable, "-P", "-c", BOOT, argument],
                stdin=subprocess.DEVNULL,
                pass_fds=(requests.fileno(), file, ring, reports.fileno(), *queue.descriptors),
                start_new_session=True,  # signals from a terminal are for the training process
            )
        finally:
            os.close(file)
            requests.close()

    def start(self, worker: int) -> None:
        """Request a decode process."""
        self._requested.add(worker)
        with suppress(BrokenPipeError, ConnectionResetError):  # `ended` reports the server's end
            self.socket.send(json.dumps({"start": worker}).encode())

    def ended(self) -> list[Ended]:
        """Receive the server's events; return the workers whose processes have ended.

        Raises:
            DataError: a killed process doesn't end.
        """
        found: list[Ended] = []
        while readable(self.socket.fileno(), 0.0):
            try:
                packet = self.socket.recv(1 << 16)
            except ConnectionResetError:
                packet = b""
            if not packet:
                return [*found, *self._all_ended()]
            event = json.loads(packet)
            worker = event["worker"]
            self._requested.discard(worker)
            if "process" in event:
                self.processes[worker] = event["process"]
            else:
                process = self.processes.pop(worker, 0)
                found.append(Ended(worker, process, event["ended"]))
        return found

    def close(self, seconds: float) -> None:
        """End the server and its decode processes; those in the middle of a read are killed.

        Args:
            seconds: that they have to end by themselves. A killed one that doesn't end within
                another second, because its read hangs, is left behind.
        """
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        with suppress(DataError):
            while self.processes and poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                self.ended()
        self.socket.close()
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)

    def _all_ended(self) -> list[Ended]:
        """Wait until the kernel has killed all processes of a server that ended."""
        self.has_ended = True
        self.process.kill()
        try:
            self.process.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            raise DataError(
                f"The server of the decode processes (pid {self.process.pid}) was killed and "
                f"hasn't ended within {_KILLED_S:g} s: repair the disk or network, and start the "
                "same command again to resume."
            ) from None
        ended = []
        for worker, process in self.processes.items():
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(process)
                gone = readable(pidfd, _KILLED_S)
                os.close(pidfd)
                if not gone:  # its memory isn't given to others: it may still write there
                    raise DataError(
                        f"Decode process {worker} (pid {process}) was killed and hasn't ended "
                        f"within {_KILLED_S:g} s: its read of the database hangs; repair the disk "
                        "or network, and start the same command again to resume."
                    )
            ended.append(Ended(worker, process, None))
        ended += [Ended(worker, 0, None) for worker in self._requested]
        self.processes.clear()
        self._requested.clear()
        return ended


def readable(descriptor: int, seconds: float) -> bool:
    """Wait until a descriptor can be read, or for so many seconds; return whether it can."""
    # Not `select`, which takes none above 1,023: a process may have more files open.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))
