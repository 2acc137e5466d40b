"""Which memory a network card may read and write: whatever is in use, each stretch once.

Several puts read the same stretch, or ones that overlap. Which registration of an address a
transfer goes by is the library's choice, so none ends while another one that touches it is in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_Lie = tuple[int, int]  # address, bytes


@dataclass
class _Entry:
    registration: Any
    users: int = 0


class RegisteredMemory:
    """Registrations by their users.

    Args:
        register: makes one, of an address and a number of bytes.
        deregister: ends it.
    """

    def __init__(
        self, register: Callable[[int, int], Any], deregister: Callable[[Any], None]
    ) -> None:
        self._register, self._deregister = register, deregister
        self._entries: dict[_Lie, _Entry] = {}

    def take(self, address: int, size: int) -> None:
        """Register a stretch, or use it once more."""
        lie = address, size
        if lie not in self._entries:
            self._entries[lie] = _Entry(self._register(address, size))
        self._entries[lie].users += 1

    def give_back(self, address: int, size: int) -> None:
        """Use a stretch once less; end what nobody uses and no used one touches."""
        self._entries[address, size].users -= 1
        used = [lie for lie, entry in self._entries.items() if entry.users]
        for lie in [lie for lie, entry in self._entries.items() if not entry.users]:
            if not any(_touch(lie, other) for other in used):
                self._deregister(self._entries.pop(lie).registration)

    def close(self) -> None:
        """End all."""
        while self._entries:
            self._deregister(self._entries.popitem()[1].registration)


def _touch(one: _Lie, other: _Lie) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]
