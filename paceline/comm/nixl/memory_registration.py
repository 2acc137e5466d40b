"""Registration of memory with NIXL: each range in use once, counted by its users.

Several puts read the same range, or ranges that overlap. The library chooses which registration of
an address a transfer uses, so none ends while an overlapping one is in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_Range = tuple[int, int]  # address, bytes


@dataclass
class _Entry:
    """A registration and the number of its users."""

    registration: Any
    users: int = 0


class RegisteredMemory:
    """Reference-counted cache of NIXL memory registrations.

    Args:
        register: makes one, of an address and a number of bytes.
        deregister: ends it.
    """

    def __init__(
        self, register: Callable[[int, int], Any], deregister: Callable[[Any], None]
    ) -> None:
        self._register, self._deregister = register, deregister
        self._entries: dict[_Range, _Entry] = {}

    def take(self, address: int, size: int) -> None:
        """Register a range, or use it once more."""
        key = address, size
        if key not in self._entries:
            self._entries[key] = _Entry(self._register(address, size))
        self._entries[key].users += 1

    def give_back(self, address: int, size: int) -> None:
        """Use a range once less; end unused ranges that overlap no used one."""
        self._entries[address, size].users -= 1
        used = [key for key, entry in self._entries.items() if entry.users]
        for key in [key for key, entry in self._entries.items() if not entry.users]:
            if not any(_overlap(key, other) for other in used):
                self._deregister(self._entries.pop(key).registration)

    def close(self) -> None:
        """End all."""
        while self._entries:
            self._deregister(self._entries.popitem()[1].registration)


def _overlap(one: _Range, other: _Range) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]
