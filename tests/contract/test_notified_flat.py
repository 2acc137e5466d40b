"""Many steps of `notified` need no more memory, files and threads than some.

`python -m tests.harness.equivalence.memory_growth` makes ten thousand.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.processes.python_program import ROOT


@pytest.mark.usefixtures("one_core")  # the process started here inherits it
def test_nothing_grows_on_windows_of_shared_memory_and_of_tcp() -> None:
    words = ["--steps", "400", "--kinds", "shared", "tcp"]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.harness.equivalence.memory_growth", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith(": flat\n")
