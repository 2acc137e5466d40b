"""Worker without torch: starts at once, reports its environment and obeys the test's orders.

It ends with its supervisor as the real ones do, by its standard input.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys


def main() -> None:
    stage = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    stage.sendall(f"{os.getpid()}\n{os.environ['PACELINE_WORKER']}\n".encode())
    while True:
        ready, _, _ = select.select([0, stage], [], [])
        if 0 in ready and not os.read(0, 1):
            os._exit(0)
        if stage not in ready:
            continue
        order = stage.recv(100).decode().split()
        if not order:
            sys.exit("the test has gone")
        if order[:1] == ["exit"]:
            sys.exit(int(order[1]))
        if order[:1] == ["stubborn"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            stage.sendall(b"stubborn\n")


main()
