"""Two machines in one: real network namespaces joined by a cable (a veth pair). Needs root.

namespace a: eth0 10.77.0.1 ------ eth0 10.77.0.2 :namespace b
both: wrong0 172.31.77.1, an address that each has and that leads to nobody else
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A network namespace.

    Attributes:
        name: the namespace's.
        address: its end of the cable.
    """

    name: str
    address: str

    def inside(self, *command: str) -> list[str]:
        """Return a command that runs another one inside, under a hostname that misleads.

        In a mount namespace of its own, /etc/hosts says that the hostname is 192.0.2.1, which is
        nobody's (RFC 5737).
        """
        script = 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'
        shell = ["unshare", "--mount", "--uts", "sh", "-ec", script, self.name, _hosts(self.name)]
        return ["ip", "netns", "exec", self.name, *shell, *command]


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Make both inside the block; skips the test where the machine can't, but never in CI."""
    names = [f"paceline-{os.getpid()}-{end}" for end in "ab"]
    made = [Machine(name=name, address=f"10.77.0.{i + 1}") for i, name in enumerate(names)]
    with namespaces(*names):
        for machine in made:
            _add_wrong(machine)
        first, second = names
        ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", second)
        for machine in made:
            ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "eth0")
            ip("-n", machine.name, "link", "set", "eth0", "up")
        yield made[0], made[1]


@contextmanager
def namespaces(*names: str) -> Iterator[None]:
    """Make network namespaces inside the block; skips the test as `two_machines` does."""
    reason = _missing()
    if reason:
        assert os.environ.get("CI") != "true", f"CI must run this test: {reason}"
        pytest.skip(reason)
    try:
        for name in names:
            ip("netns", "add", name)
            with open(_hosts(name), "w") as hosts:
                hosts.write(f"127.0.0.1 localhost\n192.0.2.1 {name}\n")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
            if os.path.exists(_hosts(name)):
                os.unlink(_hosts(name))


def cut(machine: Machine) -> None:
    """Cut the cable at a machine's end; nobody is told."""
    ip("-n", machine.name, "link", "set", "eth0", "down")


def _add_wrong(machine: Machine) -> None:
    """Add an interface before the cable, so that who takes the first takes the wrong one."""
    inside = ("-n", machine.name)
    ip(*inside, "link", "set", "lo", "up")
    ip(*inside, "link", "add", "wrong0", "type", "veth", "peer", "wrong1")
    ip(*inside, "address", "add", "172.31.77.1/24", "dev", "wrong0")
    for name in ("wrong0", "wrong1"):
        ip(*inside, "link", "set", name, "up")


def _missing() -> str:
    """Return why this machine can't make namespaces, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "network namespaces need iproute2 and unshare"
    name = f"paceline-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "eth1")
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.decode().strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
    return ""


def _hosts(name: str) -> str:
    return f"/run/netns/{name}.hosts"


def ip(*arguments: str) -> None:
    """Run `ip` (iproute2)."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
