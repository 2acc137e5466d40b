"""Shared memory and local sockets between the processes of one machine.

Each rank's memory is an anonymous file (memfd) that its peers map. Local sockets carry its
descriptor, and later the notifications. Nothing is in a file system: the kernel frees memory and
sockets with the last process, however it ended.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.comm.transport.bootstrap import Bootstrap, connect_all
from paceline.errors import CommTimeout, PeerLost


def connect_locally(bootstrap: Bootstrap) -> list[socket.socket | None]:
    """Connect ranks of one machine by local sockets; collective. As `connect_all`."""
    name = f"\0paceline-{secrets.token_hex(16)}"  # an abstract address, in no file system
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        return connect_all(bootstrap, server, name[1:], _call)


def share_memory(
    bootstrap: Bootstrap, ends: Sequence[socket.socket | None], size: int
) -> tuple[Tensor, list[Tensor | None]]:
    """Make this rank's memory, (bytes,), and map that of the connected ranks; collective.

    Raises:
        CommError: a rank did not send its memory.
    """
    own = os.memfd_create(f"paceline window of rank {bootstrap.rank}")
    try:
        # An empty file can't be mapped.
        os.ftruncate(own, max(size, 1))
        memory = _mapped(own, size)
        for peer, end in enumerate(ends):
            if end is not None:
                with _named(bootstrap, peer):
                    socket.send_fds(end, [b"\0"], [own])
        return memory, [_reach(bootstrap, peer, end, size) for peer, end in enumerate(ends)]
    finally:
        # The mappings keep the memory.
        os.close(own)


def _reach(bootstrap: Bootstrap, peer: int, end: socket.socket | None, size: int) -> Tensor | None:
    """Map a peer's memory."""
    if end is None:
        return None
    end.settimeout(bootstrap.limit)
    with _named(bootstrap, peer):
        _, descriptors, _, _ = socket.recv_fds(end, 1, 1)
        if not descriptors:
            raise ConnectionError("the peer sent no file descriptor")
    try:
        return _mapped(descriptors[0], size)
    finally:
        os.close(descriptors[0])


@contextmanager
def _named(bootstrap: Bootstrap, peer: int) -> Iterator[None]:
    """Name the peer in errors."""
    try:
        yield
    except TimeoutError as error:
        raise CommTimeout(
            f"rank {bootstrap.rank} timed out after {bootstrap.limit:g} s waiting for the shared "
            f"memory of rank {peer}."
        ) from error
    except OSError as error:
        raise PeerLost(
            rank=bootstrap.rank, peer=peer, operation="mapping its shared memory", cause=f"{error}"
        ) from error


def _mapped(descriptor: int, size: int) -> Tensor:
    """Map a file into memory; it stays mapped as long as the tensor lives."""
    return torch.frombuffer(mmap.mmap(descriptor, max(size, 1)), dtype=torch.uint8)[:size]


def _call(where: str, limit: float) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    end.settimeout(limit)
    end.connect(f"\0{where}")
    return end
