"""Addresses of this machine: IPv4 where it has any, otherwise IPv6.

A machine may have no IPv4 at all, its loopback included; and of each interface the first address
counts, as Linux lists them. Addresses of one link only (fe80::) lead to no other machine.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from functools import cache
from pathlib import Path

_SIOCGIFADDR = 0x8915
_IPV6_TABLE = Path("/proc/net/if_inet6")  # address, index, prefix, scope, flags, name
_GLOBAL = {"00", "10"}  # scopes: everywhere, this machine


@cache
def loopback() -> str:
    """Return the address at which this machine's processes reach each other: 127.0.0.1, or ::1."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # A socket of IPv4 can be made without the loopback
            # having an address: only binding shows it.
            probe.bind(("127.0.0.1", 0))
    except OSError:
        return "::1"
    return "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Return whether a host is a numeric address of the loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_and_port(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of a numeric address, or of "", which is that of all interfaces."""
    of = address or loopback()
    return socket.AF_INET6 if ":" in of else socket.AF_INET


def interfaces() -> dict[str, str]:
    """Return the names of this machine's network interfaces and an address of each."""
    later = _ipv6_addresses()
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                if name in later:
                    found[name] = later[name]
            else:
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def resolve(host: str) -> list[str]:
    """Return the addresses of a host's name: IPv4 if it has any, otherwise IPv6; none: unknown."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, family)]
    return []


def _ipv6_addresses() -> dict[str, str]:
    """Return the first IPv6 address of each interface that leads further than its link."""
    found: dict[str, str] = {}
    with suppress(OSError):  # a kernel without IPv6
        for line in _IPV6_TABLE.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope in _GLOBAL:
                found.setdefault(name, str(ipaddress.IPv6Address(int(digits, 16))))
    return found
