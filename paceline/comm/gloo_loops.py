"""Event loops of Gloo's devices: their ports, and the connections that they wait for.

Torch gives no access to them. They are found among this process's descriptors, and the kernel names
the files that each loop has (`/proc/self/fdinfo`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import secrets
import select
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

_EVENT_LOOP = "anon_inode:[eventpoll]"
_WATCHED = re.compile(r"^tfd: +(\d+) .*\bdata: +([0-9a-f]+) .*\bino:([0-9a-f]+)", re.MULTILINE)
_MODIFY = 3  # EPOLL_CTL_MOD
_EVENT = "=IQ" if platform.machine() == "x86_64" else "@IQ"  # struct epoll_event: events, data


@dataclass(frozen=True)
class _Watched:
    """A file of an event loop: its inode, and what the loop's owner has in its events' data."""

    inode: int
    data: int


def descriptors() -> dict[int, str]:
    """Return what each descriptor of this process refers to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def stop_listening(opened: dict[int, str], address: str) -> list[int]:
    """Close the port of a Gloo device whose group is connected.

    Gloo would accept every connection until the group ends, keep its descriptor, and abort the
    process when it has no more. It also aborts if its listening socket fails. The descriptor
    therefore gets another listening socket, which no process can address; until the device's
    event loop has forgotten the port, `accept` finds no connection there.

    Args:
        opened: the descriptors that the device opened, and what each refers to.
        address: the IP address on which it listens.

    Returns:
        the descriptors of its event loops.
    """
    with ExitStack() as stack:
        for number, target in opened.items():
            if target.startswith("socket:") and _listens(number, address):
                numbers = [
                    loop
                    for loop, kind in opened.items()
                    if kind == _EVENT_LOOP and number in _watched(loop)
                ]
                if numbers:  # otherwise it is another thread's port, opened meanwhile
                    loops = [select.epoll.fromfd(os.dup(loop)) for loop in numbers]
                    for loop in loops:
                        stack.enter_context(loop)
                    # The port would accept anybody for the life of the group. Gloo expects the
                    # descriptor to be there, so another socket takes its number.
                    _replace(number, loops)
                    return numbers
    return []


def connections_of(loop: int) -> Iterator[tuple[int, socket.socket]]:
    """Yield the connections that an event loop of this process has: descriptor, and a duplicate.

    A descriptor that Gloo closes at this moment may be another thread's file at the next: only the
    duplicate is certainly the connection. It is closed afterwards.
    """
    for number, watched in _watched(loop).items():
        with suppress(OSError), _duplicate(number, watched.inode) as connection:
            connection.getpeername()  # raises where it is the listening socket
            yield number, connection


def shut_down(loops: Sequence[int]) -> None:
    """Shut the connections of event loops down by `shutdown(2)`: both sides' waits end."""
    for loop in loops:
        for _, connection in connections_of(loop):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def report_once(loops: Sequence[int]) -> None:
    """Let event loops of connections that are shut down rest, after one more event of each.

    Gloo leaves data unread for which a collective that has ended has no more memory. Its loop would
    get events of that connection again and again, and use up a core until the group is dropped.

    Args:
        loops: descriptors of event loops whose group exists and is aborted: Gloo adds no connection
            to them any more. One that it removes at this moment is passed over by the kernel.
    """
    for loop in loops:
        for number, watched in _watched(loop).items():
            with suppress(OSError), _duplicate(number, watched.inode) as connection:
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    # By the C library: Python's `epoll.modify` replaces the data, Gloo's pointer.
                    event = struct.pack(_EVENT, select.EPOLLIN | select.EPOLLET, watched.data)
                    ctypes.CDLL(None).epoll_ctl(loop, _MODIFY, number, event)


def _duplicate(number: int, inode: int) -> socket.socket:
    """Duplicate a descriptor; raise OSError where it isn't the socket of that inode (any more)."""
    copy = os.dup(number)
    status = os.fstat(copy)
    if status.st_ino != inode or not stat.S_ISSOCK(status.st_mode):  # or the pipe that wakes a loop
        os.close(copy)
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return socket.socket(fileno=copy)


def _watched(loop: int) -> dict[int, _Watched]:
    """Return the descriptors whose files an event loop of this process has.

    A loop names each file by the descriptor that it was added by. In a loop of another thread that
    number may by now be another file's.
    """
    found = {}
    with suppress(OSError):  # another thread's loop, which is closed by now
        lines = Path(f"/proc/self/fdinfo/{loop}").read_text()
        for digits, data, inode in _WATCHED.findall(lines):
            with suppress(OSError):
                # The number may be another file's since the listing was made.
                if os.fstat(int(digits)).st_ino == int(inode, 16):
                    found[int(digits)] = _Watched(inode=int(inode, 16), data=int(data, 16))
    return found


def _listens(number: int, address: str) -> bool:
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as port:
        accepts = port.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(accepts) and port.getsockname()[0] == address
    return False


def _replace(number: int, loops: Sequence[select.epoll]) -> None:
    """Give a listening descriptor another socket, of which its event loops get no event."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0paceline-{secrets.token_hex(16)}")
        silent.listen(0)
        silent.setblocking(False)
        for loop in loops:
            # Before the number means another socket: epoll knows files, and not numbers.
            loop.unregister(number)
        os.dup2(silent.fileno(), number, inheritable=False)
        for loop in loops:
            loop.register(number, 0)  # Gloo unregisters it at the end
