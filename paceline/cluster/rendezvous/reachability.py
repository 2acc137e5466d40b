"""Which address of each machine the others reach: found by connecting, not by looking names up.

A hostname may stand for a wrong address or for 127.0.1.1, and a machine has addresses that lead
nowhere (bridges of containers, unplugged cards). So each machine listens on all interfaces, posts
the addresses of its interfaces, and tries all of the others' at once. The address of a machine is
the first of its own at which every other machine reached it.

A connection carries a greeting alone (`comm/handshake.py`), by the run's job token and the numbers
of both machines, so that neither an unauthenticated process nor another run's machine counts as a
peer; nor does this machine, at an address that each has (172.17.0.1).

Of each interface one address is tried; see `comm/addresses.py`.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress

from torch._C._distributed_c10d import Store

from paceline.cluster.rendezvous.deadline import Deadline, describe_numbers, missing_numbers
from paceline.cluster.rendezvous.registration import Registration
from paceline.comm.addresses import (
    family_of,
    interfaces,
    is_loopback,
    loopback,
    resolve,
)
from paceline.comm.handshake import GreetingError, Handshakes, Identity, authenticate, secret_of
from paceline.errors import CommError, ConfigError

_CONNECT_S = 3.0
_ANSWER_S = 15.0
"""A peer answers once it has read the world from the store, which may be slow to show it."""

_PROBE_REPORTS_S = 60.0  # for all machines' reports on which addresses they reached
_READ_REPORTS_S = 5.0  # for the others to read the reports, where they show no common address


def candidate_addresses(
    available: Mapping[str, str], interface_names: Sequence[str]
) -> tuple[str, ...]:
    """Return the addresses at which peers may try to reach this machine, the preferred ones first.

    Args:
        available: what `interfaces` returned.
        interface_names: names of interfaces; none: all but the loopback.

    Raises:
        ConfigError: there is no such interface, or none with an address.
    """
    for name in interface_names:
        if name not in available:
            raise ConfigError(
                f"--distributed_interfaces {name}: this machine has no such interface with an "
                f"address; it has {', '.join(available) or 'none'}."
            )
    if interface_names:
        return tuple(available[name] for name in interface_names)
    addresses = [a for a in available.values() if not is_loopback(a)]
    if not addresses:
        raise ConfigError(
            "The only network interface with an address on this machine is the loopback: "
            "connect the machine to a network, or use the loopback with --distributed_interfaces "
            "lo."
        )
    return tuple(addresses)


def own_addresses(interface_names: Sequence[str], *, other_machines: bool) -> tuple[str, ...]:
    """Return the addresses at which peers may try to reach this machine, by `candidate_addresses`.

    If not `other_machines`, all peers are on this machine, and the only address is the loopback's.
    """
    return candidate_addresses(interfaces(), interface_names) if other_machines else (loopback(),)


def listening_address(
    host: str, available: Mapping[str, str], interface_names: Sequence[str]
) -> str:
    """Return the address to listen on for peers that connect to `host`; "" for all interfaces.

    Args:
        host: a name or an address of this machine, as an option gives it.
        available: what `interfaces` returned.
        interface_names: names of interfaces; none: the one with the address of `host`.
    """
    if host == "localhost":
        return loopback()
    if is_loopback(host):
        return host
    own = [a for a in resolve(host) if a in available.values() and not is_loopback(a)]
    if own:  # otherwise a name that only the peers know
        return own[0]
    return available.get(interface_names[0], "") if len(interface_names) == 1 else ""


class ProbeListener:
    """Listener of the reachability probes that peers send to this machine's addresses.

    Attributes:
        port: the port on which it listens, on all interfaces.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("", 0), family=family_of(""), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._thread: threading.Thread | None = None

    def answer(self, token: str, machine: int, expected: int = 0) -> None:
        """Begin to answer as `machine` of the run with this job token.

        Args:
            token: the run's job token.
            machine: this machine's number.
            expected: number of probes that may come at once.
        """
        what = (_identity(token, machine), expected)
        self._thread = threading.Thread(
            target=self._run, args=what, name="probe listener", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        if self._thread is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            self._thread.join()
        self._listener.close()

    def _run(self, me: Identity, expected: int) -> None:
        with (
            suppress(OSError),  # the listener is closed
            closing(Handshakes(self._listener, me, None, expected)) as handshakes,
        ):
            while True:
                _, connection = handshakes.next()
                connection.close()


def probe_peers(
    token: str,
    machine: int,
    peers: Mapping[int, tuple[Sequence[str], int]],
    pause: Callable[[], None],
) -> dict[int, list[str]]:
    """Probe all addresses of all peers at once; return those at which each was reached.

    If `pause` ends the wait, the probes under way end at their own timeouts.

    Args:
        token: the run's job token.
        machine: this machine's number.
        peers: each other machine's candidate addresses and port.
        pause: called while probes are under way; may raise to end the wait.
    """
    me = _identity(token, machine)
    worked = set[tuple[int, str]]()

    def probe(peer: int, address: str, port: int) -> None:
        with (
            # One address of several; `choose_addresses` says if none worked.
            suppress(OSError, GreetingError),
            socket.create_connection((address, port), timeout=_CONNECT_S) as connection,
        ):
            authenticate(connection, me, _name(peer), time.monotonic() + _ANSWER_S)
            # A container's bridge has the same address on each machine: this one itself, or another
            # run's, may answer there; neither proves to be the peer.
            worked.add((peer, address))

    probes = [
        threading.Thread(target=probe, args=(peer, a, port), name=f"probe {a}", daemon=True)
        for peer, (addresses, port) in peers.items()
        for a in addresses
    ]
    # At once, because an address that leads nowhere takes the whole limit to fail.
    for thread in probes:
        thread.start()
    while any(thread.is_alive() for thread in probes):
        pause()
    return {
        peer: [a for a in addresses if (peer, a) in worked]
        for peer, (addresses, _) in peers.items()
    }


def agreed_addresses(
    store: Store,
    token: str,
    registrations: Sequence[Registration],
    machine: int,
    listener: ProbeListener | None,
    deadline: Deadline,
    check: Callable[[list[int]], None] = lambda missing: None,
) -> tuple[str, ...]:
    """Find each machine's address, the same to all, by probes of all of them.

    Args:
        store: the start's.
        token: the job token.
        registrations: one of each machine.
        machine: this machine's number.
        listener: answers the others' probes; None: another process of this machine probes.
        deadline: the limit.
        check: called with the machines that are waited for; may raise.

    Raises:
        CommError: a machine has no address that all others reached; names the machines.
    """
    numbers = range(len(registrations))
    if listener is not None:
        own = registrations[machine].addresses
        listener.answer(token, machine, (len(registrations) - 1) * len(own))
        others = {
            i: (registrations[i].addresses, registrations[i].port) for i in numbers if i != machine
        }
        store.set(
            f"reach/{machine}", json.dumps(probe_peers(token, machine, others, deadline.pause))
        )
    reports_deadline = deadline.sooner(_PROBE_REPORTS_S, "start the run again")
    while missing := missing_numbers(store, "reach", len(registrations)):
        check(missing)
        reports_deadline.check_and_pause(
            f"the connections of {describe_numbers('machine', missing, len(registrations))}"
        )
    reports = [json.loads(store.get(f"reach/{i}")) for i in numbers]
    # After the reports are read: they may go with the process that waits for this entry.
    store.set(f"judged/{machine}", "1")
    reached = [{int(peer): addresses for peer, addresses in report.items()} for report in reports]
    try:
        return choose_addresses([entry.addresses for entry in registrations], reached)
    except CommError:
        # All come to this end by the same reports, which go with the process that serves the store.
        read_deadline = time.monotonic() + _READ_REPORTS_S
        while (
            missing_numbers(store, "judged", len(registrations))
            and time.monotonic() < read_deadline
        ):
            deadline.pause()
        raise


def choose_addresses(
    offered: Sequence[Sequence[str]], reached: Sequence[Mapping[int, Sequence[str]]]
) -> tuple[str, ...]:
    """Return each machine's address: the first that all others reached it at.

    Args:
        offered: each machine's candidates, in its order of preference.
        reached: for each machine, at which addresses it reached each of the others.

    Raises:
        CommError: there is none; names the machines.
    """
    return tuple(
        _common_address(machine, offered[machine], reached) for machine in range(len(offered))
    )


def _common_address(
    machine: int, offered: Sequence[str], reached: Sequence[Mapping[int, Sequence[str]]]
) -> str:
    others = [peer for peer in range(len(reached)) if peer != machine]
    for address in offered:
        if all(address in reached[peer][machine] for peer in others):
            return address
    cut_off = [peer for peer in others if not reached[peer][machine]] or others
    raise CommError(
        f"Machine {machine} has no address that "
        f"{'all of the machines' if len(cut_off) > 1 else 'machine'} "
        f"{', '.join(map(str, cut_off))} can reach (it has {', '.join(offered)}): check firewalls, "
        "or use --distributed_interfaces to name the interfaces that connect the machines."
    )


def _identity(token: str, machine: int) -> Identity:
    return Identity(name=_name(machine), secret=secret_of(token, "reachability probe"))


def _name(machine: int) -> str:
    return f"machine {machine}"
