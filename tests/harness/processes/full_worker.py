"""Worker as the commands run it, which obeys the test's orders."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta

from torch._C._distributed_c10d import Store

from paceline.cluster.environment import WORKER_VARIABLE, read_environment
from paceline.cluster.membership.generation import Group
from paceline.cluster.supervision.worker import run_worker
from paceline.errors import DataError
from tests.harness.processes.gloo_all_reduce import sum_of_ranks


def work(group: Group, store: Store) -> None:
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as stage:
        stage.sendall(f"{os.getpid()}\n{os.environ[WORKER_VARIABLE]}\n".encode())
        for line in stage.makefile("r"):
            _obey(line.strip(), stage, group, store)


def _obey(order: str, stage: socket.socket, group: Group, store: Store) -> None:
    if order == "sum the ranks":
        stage.sendall(f"{sum_of_ranks(group, store)}\n".encode())
    elif order == "have a child":
        subprocess.Popen(["sleep", "1000"], pass_fds=[stage.fileno()])
        stage.sendall(b"born\n")
    elif order == "wait in C++":
        # A handler in Python runs only once C++ returns: this worker doesn't react to SIGTERM.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        stage.sendall(b"waiting\n")
        store.wait(["never"], timedelta(hours=1))
    elif order == "find damage":
        raise DataError("record 7 of the test is damaged.")
    elif order == "have a bug":
        raise KeyError("a bug")
    elif order == "end":
        sys.exit(0)


if __name__ == "__main__":
    worker_environment = read_environment().worker
    assert worker_environment is not None
    run_worker(worker_environment, work)
