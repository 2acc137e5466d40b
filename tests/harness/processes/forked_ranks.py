"""Ranks of a `paceline` command as torchrun would start them, forked from a process that is ready.

    test ── request ──▶ launcher ── fork ──▶ rank 0, rank 1, …
         ◀─ statuses ─  (imports torch once)  (each with torchrun's variables)

A rank that imports torch and what torch imports with its first optimizer takes ten times as long.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.harness.network.ports import free_port
from tests.harness.processes.command import Ended

LIMIT = 300.0  # the first ranks of a fresh clone compile the kernels
ROOT = Path(__file__).parents[3]


class Launcher:
    """A process that forks ranks on request, until its block ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def run(self, arguments: Sequence[str], machines: Sequence[int], folder: Path) -> Ended:
        """Run a command as the ranks of one world, until all have ended.

        Args:
            arguments: of `paceline`.
            machines: the number of ranks of each machine.
            folder: the ranks' current folder.

        Returns:
            the largest status, and the output of all ranks.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        log = folder / "printed"
        log.touch()
        request = {
            "arguments": list(arguments),
            "ranks": torchrun_variables(machines),
            "folder": str(folder),
            "log": str(log),
        }
        self._process.stdin.write(f"{json.dumps(request)}\n".encode())
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], LIMIT)
        assert ready, f"still running after {LIMIT} s:\n{log.read_text()}"
        answer = self._process.stdout.readline()
        assert answer, f"the launcher ended:\n{log.read_text()}"
        return Ended(max(json.loads(answer)), log.read_text())


def torchrun_variables(machines: Sequence[int]) -> list[dict[str, str]]:
    """Return the variables that torchrun sets for each rank of a world.

    Args:
        machines: the number of ranks of each machine.
    """
    ranks = [(number, local) for number, size in enumerate(machines) for local in range(size)]
    port = str(free_port())
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(ranks)),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(machines[machine]),
            "GROUP_RANK": str(machine),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for rank, (machine, local) in enumerate(ranks)
    ]


def _serve() -> None:
    """Fork ranks for each request, a line of JSON on standard input."""
    import torch

    from paceline.cli import train  # noqa: F401 - `main` imports it when it is called

    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports as much again as torch
    for line in sys.stdin:
        request = json.loads(line)
        ranks = [_fork(variables, request) for variables in request["ranks"]]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        print(json.dumps([abs(status) for status in statuses]), flush=True)


def _fork(variables: dict[str, str], request: dict[str, Any]) -> int:
    from paceline.cli.main import main

    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(request["folder"])
        os.environ.update(variables)
        status = main(request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
