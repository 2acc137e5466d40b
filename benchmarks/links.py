"""Networks of several machines on one: loopback, a cable, a switch; all but the first shaped.

    cable    namespace ── eth0 10.77.0.1 ══ veth, tbf both ways ══ eth0 10.77.0.2 ── namespace

    switch   namespace ── eth0 10.77.0.1 ══ veth, tbf both ways ══ port1 ┐
             namespace ── eth0 10.77.0.2 ══ veth, tbf both ways ══ port2 ┼ bridge, in a namespace
             …                                                           ┘

A namespace has no name: it lives as long as a process inside, so that nothing is ever left behind,
not even by `kill -9`. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

LOOPBACK = "loopback"
CONGESTION = "reno"  # every kernel has it, and Cubic is the same where round trips are as short
TOOLS = ("ip", "tc", "nsenter", "unshare")


class LinkError(Exception):
    """The link can't be made here; says why."""


@contextmanager
def measuring(what: object) -> Iterator[None]:
    """Run a block that needs links; where they can't be made, print so instead of what it prints.

    Args:
        what: what isn't measured then.
    """
    try:
        yield
    except LinkError as error:
        print(f"\n{what}: not measured, as {error}.", flush=True)


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
    _require_tools()
    with ExitStack() as stack:
        first, second = stack.enter_context(_namespace()), stack.enter_context(_namespace())
        _lay_cable(first, "eth0", second)
        yield _bring_up(first, 1, link), _bring_up(second, 2, link)


@contextmanager
def switch(rate: str, machines: int) -> Iterator[Sequence[Machine]]:
    """Make machines that reach each other through a switch, each at a rate that `tc` knows.

    Raises:
        LinkError: this machine, or this user, can't.
    """
    _require_tools()
    with ExitStack() as stack:
        middle = stack.enter_context(_namespace())
        _run(*_enter(middle), "ip", "link", "add", "switch", "type", "bridge")
        _run(*_enter(middle), "ip", "link", "set", "switch", "up")
        ends = []
        for number in range(1, machines + 1):
            holder, port = stack.enter_context(_namespace()), f"port{number}"
            _lay_cable(middle, port, holder)
            _run(*_enter(middle), "ip", "link", "set", port, "master", "switch", "up")
            _shape(middle, port, rate)
            ends.append(_bring_up(holder, number, rate))
        yield ends


def _require_tools() -> None:
    if os.geteuid() != 0:
        raise LinkError("shaped links need root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise LinkError(f"shaped links need {' and '.join(missing)} (iproute2, util-linux)")


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


def _enter(holder: int) -> tuple[str, ...]:
    """Return a command that runs another one in a namespace."""
    return ("nsenter", "--target", str(holder), "--net", "--")


def _lay_cable(first: int, name: str, second: int) -> None:
    """Join two namespaces by a cable, whose end is eth0 in the second one."""
    peer = ("peer", "name", "eth0", "netns", str(second))
    _run("ip", "link", "add", name, "netns", str(first), "type", "veth", *peer)


def _bring_up(holder: int, number: int, rate: str) -> Machine:
    """Give a namespace its address, and its end of the cable its rate."""
    enter, address = _enter(holder), f"10.77.0.{number}"
    _run(*enter, "ip", "link", "set", "lo", "up")
    _run(*enter, "ip", "address", "add", f"{address}/24", "dev", "eth0")
    _run(*enter, "ip", "link", "set", "eth0", "up")
    _shape(holder, "eth0", rate)
    _run(*enter, "sh", "-c", f"echo {CONGESTION} > /proc/sys/net/ipv4/tcp_congestion_control")
    return Machine(address=address, interface="eth0", enter=enter)


def _shape(holder: int, interface: str, rate: str) -> None:
    """Limit what leaves by an interface."""
    bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    _run(*_enter(holder), "tc", "qdisc", "replace", "dev", interface, "root", *bucket)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(command[command.index("--") + 1 :] if "--" in command else command)
        raise LinkError(f"`{words}` failed: {done.stderr.strip()}")
