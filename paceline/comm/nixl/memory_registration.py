"""Registration of memory with NIXL: each range in use once, counted by its users.

Several puts read the same range, or ranges that overlap. The library chooses which registration of
an address a transfer uses, so none ends while an overlapping one is in use.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

_Range = tuple[int, int]  # address, bytes


class RegisteredMemory:
    """Reference-counted cache of NIXL memory registrations.

    Args:
        agent: this process's NIXL agent, which makes and ends the registrations.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._registrations: dict[_Range, Any] = {}
        self._users: Counter[_Range] = Counter()

    def take(self, memory: Tensor) -> None:
        """Register (bytes,) of uint8, or use them once more."""
        key = _range(memory)
        if key not in self._registrations:
            self._registrations[key] = self._agent.register_memory([(*key, 0, "")], "DRAM")
        self._users[key] += 1

    def give_back(self, memory: Tensor) -> None:
        """Use (bytes,) once less; end unused registrations that overlap no used one."""
        self._users[_range(memory)] -= 1
        self._users = +self._users
        for key in self._registrations.keys() - self._users.keys():
            if not any(
                key[0] < start + size and start < key[0] + key[1] for start, size in self._users
            ):
                self._agent.deregister_memory(self._registrations.pop(key))

    def close(self) -> None:
        """End all, and let go of the agent."""
        while self._registrations:
            self._agent.deregister_memory(self._registrations.popitem()[1])
        self._agent = None


def _range(memory: Tensor) -> _Range:
    return memory.data_ptr(), memory.numel()
