"""Which process on which machine, so that the same machine's processes can ask the kernel.

A process number alone names no process: numbers are used again, and each container has its own. It
goes with its start time, and with the kernel's boot id and the namespaces in which it has meaning.
Linux only: the facts come from /proc.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """Process identity: identifies one process among all processes of all machines and boots.

    Attributes:
        host: the machine's host name, for messages only; it isn't part of any comparison.
        kernel: boot id and PID namespace. If they equal this process's own, this machine's kernel
            can tell whether `pid` is alive.
        network: boot id and network namespace. If they equal this process's own, both processes
            have the same loopback interface (127.0.0.1).
        pid: the process id.
        started: the start time of the process, in clock ticks since boot.
    """

    host: str
    kernel: str
    network: str
    pid: int
    started: int

    @classmethod
    def of_this_process(cls) -> Self:
        """Return the identity of the caller's process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        started = _start_time(os.getpid())
        assert started is not None
        return cls(
            host=socket.gethostname(),
            # Containers of one machine share the boot id, but
            # a process number means nothing in the other.
            kernel=f"{boot} {os.readlink('/proc/self/ns/pid')}",
            network=f"{boot} {os.readlink('/proc/self/ns/net')}",
            pid=os.getpid(),
            started=started,
        )


def ask_kernel(
    process: ProcessIdentity, own_process: ProcessIdentity
) -> Literal["runs", "ended", "elsewhere"]:
    """Return whether a process runs, if it is (or was) one of this machine's.

    Args:
        process: the process in question.
        own_process: this process, or another one on this machine.
    """
    if process.kernel != own_process.kernel:
        return "elsewhere"
    return "runs" if _start_time(process.pid) == process.started else "ended"


def is_stopped(pid: int, started: int) -> bool:
    """Return whether a process of this machine is stopped by a signal (SIGSTOP, SIGTSTP).

    Args:
        pid: the process id.
        started: its start time, in clock ticks since boot: the number may be another's by now.
    """
    fields = _fields(pid)
    return fields is not None and fields[0] == "T" and int(fields[19]) == started


def _start_time(pid: int) -> int | None:
    """Return field 22 of /proc/<pid>/stat, or None for one that ended, a zombie among them."""
    fields = _fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def _fields(pid: int) -> list[str] | None:
    """Return /proc/<pid>/stat from field 3 on, or None where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()  # a program's name may hold blanks and brackets
