"""Addresses of a window's ranks, in a store."""

from __future__ import annotations

from dataclasses import dataclass

from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class StoredAddresses:
    """Addresses that ranks publish in a store.

    Attributes:
        store: the store; no earlier generation used it.
    """

    store: Store

    def publish(self, purpose: str, rank: int, where: str) -> None:
        """Publish this rank's address."""
        self.store.set(f"{purpose}/{rank}", where)

    def find(self, purpose: str, rank: int) -> str:
        """Return another rank's address, once it is there; within the store's timeout."""
        return self.store.get(f"{purpose}/{rank}").decode()

    def check(self) -> None:
        """Return: the ranks connect until the limit."""
