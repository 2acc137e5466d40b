"""Addresses of windows, which the ranks of a generation gather: the store may be gone by now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.comm.communicator import Communicator, gather_bytes


class Servers(Protocol):
    """Protocol of servers, which are the last ranks of a window."""

    @property
    def address(self) -> str:
        """The address of this machine at which the other ranks and the servers reach it."""

    @property
    def count(self) -> int:
        """The number of servers."""

    def publish(self, addresses: Sequence[str]) -> None:
        """Give the servers the addresses that the ranks have gathered; called on rank 0.

        Raises:
            CommError: the servers can't be reached.
        """


class GatheredAddresses:
    """Addresses that all ranks gather by their communicator, for themselves and for servers.

    Args:
        communicator: connects the ranks.
        servers: need them, too; None: there are none.
    """

    def __init__(self, communicator: Communicator, servers: Servers | None = None) -> None:
        self._communicator = communicator
        self._servers = servers
        self._gathered: dict[str, list[str]] = {}  # of the ranks, by purpose

    def publish(self, purpose: str, rank: int, where: str) -> None:
        """Gather all ranks' addresses for a purpose; collective."""
        what = "the addresses of windows"
        received = gather_bytes(self._communicator, where.encode(), what)
        addresses = [data.decode() for data in received]
        self._gathered[purpose] = addresses
        if self._servers is not None and rank == 0:
            self._servers.publish(addresses)

    def find(self, purpose: str, rank: int) -> str:
        """Return a rank's address of those that were gathered."""
        return self._gathered[purpose][rank]

    def check(self) -> None:
        """Return: the ranks connect by them until the limit."""
