"""Many steps of `notified` need no more memory, files and threads than some.

`python -m tests.harness.equivalence.memory_growth` makes ten thousand.
"""

from __future__ import annotations

import sys

from tests.harness.processes.command import Running
from tests.harness.processes.python_program import ROOT


def test_nothing_grows_on_windows_of_shared_memory_and_of_tcp() -> None:
    words = ["--steps", "400", "--kinds", "shared", "tcp"]
    command = (sys.executable, "-m", "tests.harness.equivalence.memory_growth", *words)
    ended = Running(command, folder=ROOT, variables={}).wait()
    assert ended.status == 0, ended.text
    assert ended.text.endswith(": flat\n")
