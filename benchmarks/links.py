"""Links between two machines on one: loopback, and cables shaped to a rate.

    namespace ── eth0 10.77.0.1 ══ veth, tbf both ways ══ eth0 10.77.0.2 ── namespace

A namespace has no name: it lives as long as a process inside, so that nothing is ever left behind,
not even by `kill -9`. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

LOOPBACK = "loopback"
TOOLS = ("ip", "tc", "nsenter", "unshare")


class LinkError(Exception):
    """The link can't be made here; says why."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One end of a link.

    Attributes:
        address: the end's IP address.
        interface: its network interface.
        enter: a command that runs another one there.
    """

    address: str
    interface: str
    enter: tuple[str, ...] = ()


@contextmanager
def connect(link: str) -> Iterator[tuple[Machine, Machine]]:
    """Make two machines joined by `link`: "loopback", or a rate that `tc` knows, as 1gbit.

    Raises:
        LinkError: this machine, or this user, can't.
    """
    if link == LOOPBACK:
        end = Machine(address="127.0.0.1", interface="lo")
        yield end, end
        return
    if os.geteuid() != 0:
        raise LinkError("shaped links need root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise LinkError(f"shaped links need {' and '.join(missing)} (iproute2, util-linux)")
    with ExitStack() as stack:
        first, second = stack.enter_context(_namespace()), stack.enter_context(_namespace())
        ends = (_end(first, "10.77.0.1"), _end(second, "10.77.0.2"))
        peer = ("peer", "name", "eth0", "netns", str(second))
        _run("ip", "link", "add", "eth0", "netns", str(first), "type", "veth", *peer)
        for end in ends:
            _run(*end.enter, "ip", "link", "set", "lo", "up")
            _run(*end.enter, "ip", "address", "add", f"{end.address}/24", "dev", "eth0")
            _run(*end.enter, "ip", "link", "set", "eth0", "up")
            shape = ("tbf", "rate", link, "burst", "256kb", "latency", "50ms")
            _run(*end.enter, "tc", "qdisc", "replace", "dev", "eth0", "root", *shape)
        yield ends


@contextmanager
def _namespace() -> Iterator[int]:
    """Yield a process alone in a network namespace; it ends with this one's end of its pipe."""
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo up; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C is its parent's
    )
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        if not holder.stdout.readline():
            raise LinkError(f"no network namespaces here: {holder.stderr.read().decode().strip()}")
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()


def _end(holder: int, address: str) -> Machine:
    enter = ("nsenter", "--target", str(holder), "--net", "--")
    return Machine(address=address, interface="eth0", enter=enter)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(command[command.index("--") + 1 :] if "--" in command else command)
        raise LinkError(f"`{words}` failed: {done.stderr.strip()}")
