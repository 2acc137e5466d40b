"""Which address of each machine the others reach: found by connecting, not by looking names up.

A hostname may stand for a wrong address or for 127.0.1.1, and a machine has addresses that lead
nowhere (bridges of containers, unplugged cards). So each machine listens on all interfaces, posts
the addresses of its interfaces, and tries all of the others' at once. The address of a machine is
the first of its own at which every other machine reached it.

A connection carries one message each way, of fixed size:

    magic (8 bytes) | proof (32 bytes) | from machine (uint32) | to machine (uint32)

The proof is a digest of the run's job token, so that neither a stranger nor another run's machine
is taken for a peer; nor is this machine itself, where an address is everybody's (172.17.0.1).

IPv4 only, and of each interface its first address, as Linux's SIOCGIFADDR tells it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Self

from paceline.errors import CommError, ConfigError

_MESSAGE = struct.Struct("!8s32sII")
_MAGIC = b"pacelin1"
_SIOCGIFADDR = 0x8915
_CONNECT_S = 3.0
_ANSWER_S = 15.0
"""A peer answers once it has read the world from the store, which may be slow to show it."""

_SILENCE_S = 1.0
"""How long somebody who connects may keep the others waiting."""


def interfaces() -> dict[str, str]:
    """Return the names of this machine's network interfaces and their IPv4 addresses."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
            else:
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def candidates(available: Mapping[str, str], wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses at which peers may try to reach this machine, the preferred ones first.

    Args:
        available: what `interfaces` returned.
        wanted: names of interfaces; none: all but the loopback.

    Raises:
        ConfigError: there is no such interface, or none with an address.
    """
    for name in wanted:
        if name not in available:
            raise ConfigError(
                f"--distributed_interfaces {name}: this machine has no such interface with an IPv4 "
                f"address; it has {', '.join(available) or 'none'}."
            )
    if wanted:
        return tuple(available[name] for name in wanted)
    addresses = [a for a in available.values() if not a.startswith("127.")]
    if not addresses:
        raise ConfigError(
            "This machine has no network interface with an IPv4 address but the loopback: connect "
            "it, or name one by --distributed_interfaces."
        )
    return tuple(addresses)


class ProbeListener:
    """Answers peers that try this machine's addresses, until closed.

    Attributes:
        port: where it listens, on all interfaces.
    """

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.bind(("", 0))
        self._listener.listen(128)
        self.port: int = self._listener.getsockname()[1]
        self._thread: threading.Thread | None = None

    def answer(self, token: str, machine: int) -> None:
        """Begin to answer as `machine` of the run with this job token."""
        self._thread = threading.Thread(
            target=self._run, args=(_proof(token), machine), name="doorbell", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        if self._thread is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            self._thread.join()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, proof: bytes, machine: int) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with connection:
                _answer(connection, proof, machine)


def reach(
    token: str,
    machine: int,
    peers: Mapping[int, tuple[Sequence[str], int]],
    pause: Callable[[], None],
) -> dict[int, list[str]]:
    """Try all addresses of all peers at once; return those that each was reached at.

    Args:
        token: the run's job token.
        machine: this machine's number.
        peers: each other machine's candidate addresses and port.
        pause: called while the tries go on; may raise to end the wait.
    """
    probes = [
        _Probe((address, port), _proof(token), machine, peer)
        for peer, (addresses, port) in peers.items()
        for address in addresses
    ]
    for probe in probes:
        probe.start()
    while any(probe.is_alive() for probe in probes):
        pause()
    return {
        peer: [probe.address[0] for probe in probes if probe.peer == peer and probe.worked]
        for peer in peers
    }


def choose(
    offered: Sequence[Sequence[str]], reached: Sequence[Mapping[int, Sequence[str]]]
) -> tuple[str, ...]:
    """Return each machine's address: the first that all others reached it at.

    Args:
        offered: each machine's candidates, in its order of preference.
        reached: for each machine, at which addresses it reached each of the others.

    Raises:
        CommError: there is none; names the machines.
    """
    return tuple(_common(machine, offered[machine], reached) for machine in range(len(offered)))


def _common(
    machine: int, offered: Sequence[str], reached: Sequence[Mapping[int, Sequence[str]]]
) -> str:
    others = [peer for peer in range(len(reached)) if peer != machine]
    for address in offered:
        if all(address in reached[peer][machine] for peer in others):
            return address
    cut_off = [peer for peer in others if not reached[peer][machine]] or others
    raise CommError(
        f"Machine {machine} can't be reached from machine {', '.join(map(str, cut_off))} at any "
        f"one address of {', '.join(offered)}: check firewalls, or name the interfaces that "
        "connect the machines by --distributed_interfaces."
    )


class _Probe(threading.Thread):
    """One try of one address. A daemon: a wait that is ended leaves it to its own limit."""

    def __init__(self, address: tuple[str, int], proof: bytes, machine: int, peer: int) -> None:
        super().__init__(name=f"ring {address[0]}", daemon=True)
        self.address = address
        self.peer = peer
        self.worked = False
        self._question = _MESSAGE.pack(_MAGIC, proof, machine, peer)
        self._answer = _MESSAGE.pack(_MAGIC, proof, peer, machine)

    def run(self) -> None:
        with (
            suppress(OSError),  # one address of several; `choose` says if none worked
            socket.create_connection(self.address, timeout=_CONNECT_S) as connection,
        ):
            connection.settimeout(_ANSWER_S)
            connection.sendall(self._question)
            self.worked = hmac.compare_digest(_receive(connection), self._answer)


def _answer(connection: socket.socket, proof: bytes, machine: int) -> None:
    connection.settimeout(_SILENCE_S)
    try:
        message = _receive(connection)
        if len(message) == _MESSAGE.size:
            peer = _MESSAGE.unpack(message)[2]
            if hmac.compare_digest(message, _MESSAGE.pack(_MAGIC, proof, peer, machine)):
                connection.sendall(_MESSAGE.pack(_MAGIC, proof, machine, peer))
    except OSError:
        return  # a stranger, or a peer that has its answer by another way


def _receive(connection: socket.socket) -> bytes:
    message = b""
    while len(message) < _MESSAGE.size:
        part = connection.recv(_MESSAGE.size - len(message))
        if not part:
            break
        message += part
    return message


def _proof(token: str) -> bytes:
    return hashlib.sha256(b"paceline doorbell " + token.encode()).digest()
