"""Runs the tests of a copy of the repository until one of them notices the break in it.

The copy's own package is tested, also where the environment's is another one's. A run that exceeds
its limit has noticed the break. Processes that a broken test leaves behind are ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_FEW = 40  # tests that one process runs sooner than two processes start


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose parents end."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def noticed_by(root: Path, tests: Sequence[str], limit: float) -> str:
    """Run tests of the copy, and return the first that fails; "" if all pass.

    Args:
        root: the copy.
        tests: folders, files or identifiers of tests.
        limit: seconds, after which the run is ended.
    """
    processes = "2" if len(tests) > _FEW or (root / tests[0]).is_dir() else "0"
    listed = root / ".tests-to-run"
    listed.write_text("\n".join(tests))
    command = [
        *("nice", "-n", "19", ".venv/bin/python", "-m", "pytest", f"@{listed.name}"),
        *("--exitfirst", "--quiet", "--no-header", "-m", "not alone", "-p", "no:cacheprovider"),
        *("--numprocesses", processes, "--dist", "worksteal", "-p", "no:randomly"),
    ]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    log = root / ".tests-output"
    try:
        with log.open("w") as output:
            ended = subprocess.run(
                command, cwd=root, env=environment, stdout=output, stderr=output, timeout=limit
            )
    except subprocess.TimeoutExpired:
        return f"no end in {limit:.0f} s"
    finally:
        end_descendants()
    if not ended.returncode:
        return ""
    lines = log.read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0].partition(" - ")[0] if failed else f"noticed (status {ended.returncode})"


def end_descendants() -> None:
    """Kill the descendants of this process, which must have adopted orphans before."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := children.read_text().split():
        for pid in map(int, pids):  # its own children become ours
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
