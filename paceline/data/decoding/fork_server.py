"""Server of decode processes: imports once, has no thread, and forks each of them.

    training process ── requests ──▶ fork server ──fork──▶ decode process 0, 1, …
                     ◀── events ───

So a further decode process costs its own data only: code, index and sample makers are the server's
memory, which they share. All of them end when the training process ends, however it ends: the
server reads the end of its socket, and the kernel kills each child with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.data.decoding.chunk_queue import ChunkQueue
from paceline.data.decoding.decode_chunks import Maker, decode_chunks
from paceline.data.decoding.ring import MappedBuffers

_PR_SET_PDEATHSIG = 1
# Meant for the training process, which ends its decode processes when it ends.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class ServerSetup:
    """What a fork server is started with; descriptors are inherited under their numbers.

    Attributes:
        makers: the sample makers, by number.
        queue: the descriptors of the queue of chunks.
        ring: the descriptor of the buffers' memory.
        reports: the descriptor of the socket for reports of bad records.
    """

    makers: tuple[Maker, ...]
    queue: tuple[int, int, int]
    ring: int
    reports: int


# The first lines of the server's process: nothing is imported yet that takes time.
BOOT = f"""
import ctypes, json, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})
requests, setup, parent, sys.path[:] = json.loads(sys.argv[1])
if os.getppid() == parent:
    from paceline.data.decoding.fork_server import main
    main(requests, setup)
"""


def main(requests: int, setup: int) -> None:
    """Serve until the training process ends or closes its socket.

    Args:
        requests: descriptor of the socket.
        setup: descriptor of a file with the pickled `ServerSetup`, which that process wrote.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with open(setup, "rb") as file:
        made = pickle.load(file)
    if "torch" in sys.modules:  # the makers use it
        sys.modules["torch"].set_num_threads(1)
    with socket.socket(fileno=requests) as connection:
        serve(connection, made)


def serve(requests: socket.socket, setup: ServerSetup) -> None:
    """Fork a decode process for each request, and report each that ends."""
    server = os.getpid()
    workers: dict[int, tuple[int, int]] = {}  # by pidfd: worker, process id
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in workers:
                worker, process = workers.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(process, 0)
                _send(requests, worker=worker, ended=os.waitstatus_to_exitcode(status))
                continue
            try:
                packet = requests.recv(1 << 16)
            except ConnectionResetError:  # the training process was killed
                packet = b""
            if not packet:
                return  # children end with this process
            worker = json.loads(packet)["start"]
            process = os.fork()
            if process == 0:
                _child(worker, server, setup, requests, [*workers])
            pidfd = os.pidfd_open(process)
            poll.register(pidfd, select.POLLIN)
            workers[pidfd] = (worker, process)


def _child(
    worker: int, server: int, setup: ServerSetup, requests: socket.socket, others: Sequence[int]
) -> None:
    """Be a decode process; doesn't return."""
    status = 1
    try:
        # First: a process that is forked while its parent ends would outlive it.
        _end_with_parent(server)
        # Reported by itself: a process that is known ends with its parent.
        _send(requests, worker=worker, process=os.getpid())
        requests.close()
        for pidfd in others:
            os.close(pidfd)
        decode_chunks(
            worker,
            ChunkQueue(*setup.queue, submits=False),
            MappedBuffers(setup.ring),
            socket.socket(fileno=setup.reports),
            setup.makers,
        )
        for maker in setup.makers:
            maker.close()
        status = 0
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        print(f"paceline: a decode process ends: {text}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; it may have ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(0)


def _send(requests: socket.socket, **event: Any) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the next request reads the end
        requests.send(json.dumps(event).encode())
