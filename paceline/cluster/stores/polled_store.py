"""What the shared folder's and the Redis server's stores have in common: waiting by looking again.

`torch.distributed` keeps its meeting point behind `torch.distributed.Store`. A store written in
Python is called back by C++, which looks methods up by name; the names that it uses are these,
`getNumKeys` and `deleteKey` among them, where its own Python binding says `num_keys` and
`delete_key`. C++ keeps only its half of the object alive: whoever hands a store to a process group
or a `PrefixStore` keeps the store itself, too.

A missing key is waited for by asking again, at intervals that grow from 1 to 50 ms.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Self, TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

_T = TypeVar("_T")


class PolledStore(Store):
    """A store that can read what is there, and waits for what isn't by reading again.

    Args:
        timeout: the limit of `get`, `multi_get` and of a `wait` that gives none.
    """

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)

    @abstractmethod
    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of `keys` as they are now, None for those that aren't there."""

    @abstractmethod
    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return those of `keys` that aren't there now."""

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting for it.

        Raises:
            DistStoreError: it didn't come within the store's timeout.
        """
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys, waiting until all are there.

        Raises:
            DistStoreError: they didn't come within the store's timeout.
        """

        def values() -> list[bytes] | None:
            found = [value for value in self.read(keys) if value is not None]
            return found if len(found) == len(keys) else None

        return self._poll(values, self.limit, keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            DistStoreError: they didn't come within `timeout` (default: the store's).
        """
        limit = self.limit if timeout is None else timeout.total_seconds()
        self._poll(lambda: None if self.missing(keys) else True, limit, keys)

    def check(self, keys: list[str]) -> bool:
        """Tell whether all keys are there."""
        return not self.missing(keys)

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        """Set several keys, one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None: ...

    def has_extended_api(self) -> bool:
        """Tell C++ that `append`, `multi_get` and `multi_set` are there."""
        return True

    def getNumKeys(self) -> int:
        """Count the keys; the name by which C++ calls `num_keys`."""
        return self.num_keys()

    def deleteKey(self, key: str) -> bool:
        """Delete a key; the name by which C++ calls `delete_key`."""
        return self.delete_key(key)

    @abstractmethod
    def clone(self) -> Self:
        """Open the same store once more."""

    @property
    def limit(self) -> float:
        """The store's timeout in seconds; C++ keeps it, and a PrefixStore may change it there."""
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
        return timeout.total_seconds()

    def _poll(self, look: Callable[[], _T | None], limit: float, keys: Sequence[str]) -> _T:
        deadline = time.monotonic() + limit
        pause = 0.001
        while (found := look()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DistStoreError(f"wait timeout after {limit:g} s, keys: {', '.join(keys)}")
            time.sleep(min(pause, left))
            pause = min(1.5 * pause, 0.05)
        return found


def as_bytes(value: str | bytes) -> bytes:
    """Return a value as bytes: C++ hands over bytes, Python's callers also text."""
    return value.encode() if isinstance(value, str) else bytes(value)
