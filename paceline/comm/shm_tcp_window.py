"""A window over machines: shared memory with the ranks of this one, TCP with all others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from paceline.comm.connection_window import ConnectionWindow
from paceline.comm.shm_window import connect_locally, share_memory
from paceline.comm.tcp_window import connect_by_tcp
from paceline.comm.transport.bootstrap import Bootstrap


def shm_tcp_window(
    bootstrap: Bootstrap,
    neighbours: Sequence[int],
    address: str,
    size: int,
    notifications: int,
    marks: int = 0,
    connections: int = 1,
) -> ConnectionWindow:
    """Connect the ranks of several machines; collective.

    Args:
        bootstrap: who connects.
        neighbours: the ranks of this machine, this one included.
        address: the IP address of this machine that the peers reach.
        size: bytes of this rank's memory, the same on all ranks.
        notifications: how many each peer has.
        marks: how many moments of puts to remember, the newest.
        connections: by TCP to each rank of another machine.

    Raises:
        CommError: a rank didn't come in time, or can't be reached.
    """
    near = replace(bootstrap, purpose=f"{bootstrap.purpose}/near", only=neighbours)
    others = [rank for rank in bootstrap.ranks if rank == bootstrap.rank or rank not in neighbours]
    far = replace(bootstrap, purpose=f"{bootstrap.purpose}/far", only=others)
    with ExitStack() as stack:
        ends = connect_locally(near)
        for end in filter(None, ends):
            stack.callback(end.close)
        memory, reaches = share_memory(near, ends, size)
        streams = connect_by_tcp(far, address, connections)
        for peer, near_end in enumerate(ends):
            if near_end is not None:
                streams[peer] = [near_end]
        window = ConnectionWindow(
            bootstrap.rank, memory, streams, reaches, notifications, marks=marks
        )
        stack.pop_all()
        return window
