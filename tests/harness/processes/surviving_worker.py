"""Worker without torch that outlives its supervisor, as the real ones do, at the test's order."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NoReturn

from paceline.cluster.supervision.parent_death_watchdog import watch_parent
from paceline.cluster.supervision.requests.run_presence import RunPresence
from paceline.cluster.supervision.requests.run_status import RunStatus
from paceline.cluster.supervision.survival_mark import declare


def main() -> None:
    environment = json.loads(os.environ["PACELINE_WORKER"])
    stage = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    if stat.S_ISFIFO(os.fstat(0).st_mode):  # without a wrapper
        lost = lambda: stage.sendall(b"outlived\n")  # noqa: E731
        threading.Thread(target=watch_parent, args=(os.dup(0), lost), daemon=True).start()
    stage.sendall(f"{os.getpid()}\n{os.environ['PACELINE_WORKER']}\n".encode())
    for line in stage.makefile("r"):
        order, *words = line.split()
        if order == "survive":
            declare(environment["survival_mark"])
        elif order == "close":
            declare(environment["survival_mark"], closed=True)
        elif order == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif order == "stop-softly":
            signal.signal(signal.SIGTERM, _end)
        elif order == "present":
            _be_present(Path(words[0]), environment)
        elif order == "exit":
            sys.exit(int(words[0]))
        stage.sendall(f"{order}\n".encode())
    sys.exit("the test has gone")


def _be_present(run: Path, environment: dict[str, int]) -> None:
    RunPresence(
        run,
        id=f"member-{environment['local_rank']}",
        role="worker",
        machine=environment["machine"],
        report=lambda: RunStatus(generation=2, step=7),
    )


def _end(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


main()
