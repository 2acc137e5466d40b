"""Machines on a switch: network namespaces of which each pair can be cut apart. Needs root.

namespace of the switch: a bridge, 10.77.0.100
    port0          port1          port2
      │              │              │
    eth0           eth0           eth0
    10.77.0.1      10.77.0.2      10.77.0.3     namespaces of the machines
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from tests.harness.network.namespaces import Machine, ip, namespaces


@dataclass(frozen=True, kw_only=True)
class Switch:
    """Switch that connects machines.

    Attributes:
        name: the name of its namespace, in which servers may run.
        address: its address, which all machines reach.
        machines: the machines, in the order of the ports.
    """

    name: str
    address: str
    machines: tuple[Machine, ...]

    def unplug(self, *machines: int) -> None:
        """Take the cables of machines out of the switch; no process is notified."""
        self._set(machines, "down")

    def plug(self, *machines: int) -> None:
        """Put the cables of machines into the switch again."""
        self._set(machines, "up")

    def separate(self, *machines: int) -> None:
        """Let machines no longer reach each other; they reach all others, and the switch."""
        self._set(machines, "type", "bridge_slave", "isolated", "on")

    def processes(self, machine: int) -> list[psutil.Process]:
        """Return all processes of a machine."""
        command = ["ip", "netns", "pids", self.machines[machine].name]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        return [psutil.Process(int(pid)) for pid in found.stdout.split()]

    def _set(self, machines: tuple[int, ...], *words: str) -> None:
        for machine in machines:
            ip("-n", self.name, "link", "set", f"port{machine}", *words)


@contextmanager
def switched_machines(count: int) -> Iterator[Switch]:
    """Make machines on a switch inside the block; skips the test as `two_machines` does."""
    prefix = f"paceline-{os.getpid()}"
    switch = Switch(
        name=f"{prefix}-switch",
        address="10.77.0.100",
        machines=tuple(
            Machine(name=f"{prefix}-{number}", address=f"10.77.0.{number + 1}")
            for number in range(count)
        ),
    )
    with namespaces(switch.name, *(machine.name for machine in switch.machines)):
        inside = ("-n", switch.name)
        ip(*inside, "link", "add", "bridge", "type", "bridge")
        ip(*inside, "address", "add", f"{switch.address}/24", "dev", "bridge")
        for name in ("lo", "bridge"):
            ip(*inside, "link", "set", name, "up")
        for number, machine in enumerate(switch.machines):
            port, peer = f"port{number}", ("peer", "eth0", "netns", machine.name)
            ip(*inside, "link", "add", port, "type", "veth", *peer)
            ip(*inside, "link", "set", port, "master", "bridge")
            ip(*inside, "link", "set", port, "up")
            own = ("-n", machine.name)
            ip(*own, "address", "add", f"{machine.address}/24", "dev", "eth0")
            for name in ("lo", "eth0"):
                ip(*own, "link", "set", name, "up")
        yield switch
