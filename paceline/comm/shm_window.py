"""A window in shared memory, between the processes of one machine.

Each rank's memory is a file without a name (memfd) that its peers map; its descriptor travels over
their local sockets, which carry the notifications afterwards. Nothing is ever in a file system: the
kernel takes memory and sockets back with the last process, however it ended.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from paceline.comm.connection_window import ConnectionWindow
from paceline.comm.transport.bootstrap import Bootstrap, connect_all
from paceline.errors import CommTimeout, PeerLost


def shm_window(bootstrap: Bootstrap, size: int, notifications: int) -> ConnectionWindow:
    """Connect the ranks of one machine; collective.

    Args:
        bootstrap: who connects.
        size: bytes of this rank's memory, the same on all ranks.
        notifications: how many each peer has.

    Raises:
        CommError: a rank didn't come in time, or isn't on this machine.
    """
    with ExitStack() as stack:
        ends = connect_locally(bootstrap)
        for end in filter(None, ends):
            stack.callback(end.close)
        memory, reaches = share_memory(bootstrap, ends, size)
        streams = [[end] if end else [] for end in ends]
        window = ConnectionWindow(bootstrap.rank, memory, streams, reaches, notifications)
        stack.pop_all()
        return window


def connect_locally(bootstrap: Bootstrap) -> list[socket.socket | None]:
    """Connect ranks of one machine by local sockets; collective. As `connect_all`."""
    name = f"\0paceline-{secrets.token_hex(16)}"  # in no file system
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        return connect_all(bootstrap, server, name[1:], _call)


def share_memory(
    bootstrap: Bootstrap, ends: Sequence[socket.socket | None], size: int
) -> tuple[Tensor, list[Tensor | None]]:
    """Make this rank's memory, (bytes,), and map that of those who are connected; collective.

    Raises:
        CommError: a rank didn't send its memory.
    """
    own = os.memfd_create(f"paceline window of rank {bootstrap.rank}")
    try:
        os.ftruncate(own, max(size, 1))
        memory = _mapped(own, size)
        for peer, end in enumerate(ends):
            if end is not None:
                with _named(bootstrap, peer):
                    socket.send_fds(end, [b"\0"], [own])
        return memory, [_reach(bootstrap, peer, end, size) for peer, end in enumerate(ends)]
    finally:
        os.close(own)


def _reach(bootstrap: Bootstrap, peer: int, end: socket.socket | None, size: int) -> Tensor | None:
    """Map a peer's memory."""
    if end is None:
        return None
    end.settimeout(bootstrap.limit)
    with _named(bootstrap, peer):
        _, descriptors, _, _ = socket.recv_fds(end, 1, 1)
        if not descriptors:
            raise ConnectionError("it sent none")
    try:
        return _mapped(descriptors[0], size)
    finally:
        os.close(descriptors[0])


@contextmanager
def _named(bootstrap: Bootstrap, peer: int) -> Iterator[None]:
    """Name the peer whose connection fails."""
    try:
        yield
    except TimeoutError as error:
        raise CommTimeout(
            f"rank {bootstrap.rank} waited {bootstrap.limit:g} s for the memory of rank {peer}."
        ) from error
    except OSError as error:
        raise PeerLost(
            f"rank {bootstrap.rank} lost rank {peer} before they shared memory: {error}."
        ) from error


def _mapped(descriptor: int, size: int) -> Tensor:
    """Map a file into memory; it stays mapped as long as the tensor lives."""
    return torch.frombuffer(mmap.mmap(descriptor, max(size, 1)), dtype=torch.uint8)[:size]


def _call(where: str, limit: float) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    end.settimeout(limit)
    end.connect(f"\0{where}")
    return end
