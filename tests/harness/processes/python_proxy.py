"""Proxy for `python` where mpirun, bash or ip start it: the fork server runs the program.

    mpirun ── proxy ── argv, folder, environment, open files, namespaces ──▶ server ── fork
                       ◀────────────── pid, exit status ───────────────────

It starts in a hundredth of a second, as it imports next to nothing. Signals that it gets go to the
fork; where it is killed, the server kills the fork. A program that a fork can't be, one with an
interpreter's variables say, takes its place. The server puts a copy in a folder beside its socket.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
NAMESPACES = ("net", "uts", "mnt")


def main() -> NoReturn:
    """Have the program run; end as it ends."""
    files = [int(each) for each in os.listdir("/proc/self/fd")]
    files = [each for each in files if os.path.exists(f"/proc/self/fd/{each}")]  # not the listing
    folder, name = os.path.split(sys.argv[0])
    program = os.path.join(os.readlink(os.path.join(folder, "bin")), name)
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    environment = {**os.environ, "PATH": os.pathsep.join(each for each in path if each != folder)}
    argv = [program, *sys.argv[1:]]
    if not {0, 1, 2}.issubset(files):
        os.execve(program, argv, environment)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    server.connect(os.path.join(folder, "socket"))
    numbers = [getattr(signal, each) for each in FORWARDED]
    request = {
        "argv": argv,
        "cwd": os.getcwd(),
        "env": environment,
        "files": files,
        "ignored": [n for n in numbers if signal.getsignal(n) is signal.SIG_IGN],
    }
    namespaces = [os.open(f"/proc/self/ns/{each}", os.O_RDONLY) for each in NAMESPACES]
    socket.send_fds(server, [json.dumps(request).encode()], [*namespaces, *files])
    answer = server.recv(8)
    if not answer:
        os.execve(program, argv, environment)
    process = int.from_bytes(answer, "little")

    def forward(number: int, frame: object) -> None:
        with suppress(ProcessLookupError):  # it has ended, and its status is on its way here
            os.kill(process, number)

    for number in numbers:
        if number not in request["ignored"]:
            signal.signal(number, forward)
    ended = server.recv(8)
    if not ended:
        sys.exit(f"the fork server ended, and with it {' '.join(argv)}")
    status = os.waitstatus_to_exitcode(int.from_bytes(ended, "little"))
    if status < 0:
        if -status in numbers:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
