"""Base classes of the stores: waiting for a key by reading it again.

`torch.distributed` hides its stores behind `torch.distributed.Store`. A store written in
Python is called back by C++, which looks methods up by name; the names that it uses are these,
`deleteKey` among them, where its own Python binding says `delete_key`. C++ keeps only its half of
the object alive: the caller that hands a store to a process group or a `PrefixStore` keeps the
store itself, too.

A missing key is waited for by asking again, at intervals that grow from 1 to 50 ms.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self, TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from paceline.cluster.jitter import jitter

_T = TypeVar("_T")


class PolledStore(Store):
    """Base class of polled stores: a wait reads the keys again until they exist.

    Args:
        address: address of the store; its form depends on the kind of store (a path, a URL,
            HOST:PORT).
        space: prefix of all keys, as a path of names; "" for the whole store.
        timeout: seconds that `get` and `multi_get` wait; also the default timeout of `wait`.
        make: whether to create the space first, for kinds of stores that need it.

    Attributes:
        served_by_run: whether a process of the run serves the store; such a store ends when that
            process ends.
    """

    served_by_run: bool = False

    def __init__(self, address: str, space: str, timeout: timedelta, *, make: bool = False) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self.address = address
        self.space = space

    def erase(self) -> None:
        """Remove all keys, and what is left of the space around this one if that holds none."""

    def close(self) -> None:
        """Close the connections."""

    def server_id(self) -> str:
        """Return what changes when a server starts anew and may have lost writes; "" for none."""
        return ""

    @property
    def host(self) -> str:
        """The host of its server; "" where that is none, or one of several."""
        return ""

    def persist(self, key: str) -> None:
        """Bring a key's value to the disk, in kinds of stores that keep it there."""

    @abstractmethod
    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of `keys` as they are now, None for those that aren't there."""

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return those of `keys` that aren't there now."""
        return [key for key, value in zip(keys, self.read(keys), strict=True) if value is None]

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
        """Return whether all keys are there."""
        return not self.missing(keys)

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        """Set several keys, one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None: ...

    @abstractmethod
    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set a key if its value is `expected_value`, or if that is empty and there is no key.

        Returns:
            the value afterwards; `expected_value` where there is no key (as torch's stores do).
        """

    def has_extended_api(self) -> bool:
        """Tell C++ that `append`, `multi_get` and `multi_set` are there."""
        return True

    def deleteKey(self, key: str) -> bool:
        """Delete a key; the name by which C++ calls `delete_key`."""
        return self.delete_key(key)

    def clone(self) -> Self:
        """Open the same store once more."""
        return type(self)(self.address, self.space, timedelta(seconds=self.limit))

    @property
    def limit(self) -> float:
        """The store's timeout in seconds; C++ keeps it, and a PrefixStore may change it there."""
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
        return timeout.total_seconds()

    def _poll(self, read: Callable[[], _T | None], limit: float, keys: Sequence[str]) -> _T:
        deadline = time.monotonic() + limit
        pause = 0.001
        while (found := read()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DistStoreError(f"wait timeout after {limit:g} s, keys: {', '.join(keys)}")
            time.sleep(min(pause, left))
            # Keys of a rendezvous come within milliseconds or,
            # from a machine that starts later, after minutes.
            pause = min(1.5 * pause, 0.05)
        return found


class CompareAndSetStore(PolledStore):
    """Base class of stores that update values by compare-and-set."""

    @abstractmethod
    def read_version(self, key: str) -> tuple[Any, bytes | None]:
        """Return a value's version, as `replace` compares it, and the value; None for no key."""

    @abstractmethod
    def replace(self, key: str, version: Any, value: bytes) -> bool:
        """Set a key if its version is still the one that `read_version` returned; tell whether."""

    def update(
        self, key: str, function: Callable[[bytes | None], bytes | None], absent: bytes = b""
    ) -> bytes:
        """Replace a value by `function(value)`, again until no other process came between.

        Returns:
            the value afterwards; `absent` where there is none.

        Raises:
            DistStoreError: others changed it for as long as the store's timeout.
        """
        deadline = time.monotonic() + self.limit
        while True:
            version, old = self.read_version(key)
            new = function(old)
            if new is None or new is old:
                return absent if new is None else new
            if self.replace(key, version, new):
                return new
            if time.monotonic() > deadline:
                raise DistStoreError(
                    f"{key} couldn't be changed within {self.limit:g} s: other processes kept "
                    "changing it."
                )
            # Processes that came between each other must not do so again at the same moment.
            time.sleep(jitter(0, 0.002))

    def add(self, key: str, value: int) -> int:
        return int(self.update(key, lambda old: str(int(old or b"0") + value).encode()))

    def append(self, key: str, value: str | bytes) -> None:
        data = as_bytes(value)
        self.update(key, lambda old: (old or b"") + data)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        expected = as_bytes(expected_value)
        desired = as_bytes(desired_value)
        return self.update(key, lambda old: desired if (old or b"") == expected else old, expected)


def as_bytes(value: str | bytes) -> bytes:
    """Return a value as bytes: C++ hands over bytes, Python's callers also text."""
    return value.encode() if isinstance(value, str) else bytes(value)
