"""Short trainings by `notified`, drawn at random: none hangs, and all ranks end up equal.

`python -m tests.harness.equivalence.deadlock_hunt` makes a thousand of them.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.equivalence import deadlock_hunt as hunt
from tests.harness.processes.fork_server import ServedPopen
from tests.harness.processes.python_program import ROOT

LOSING = """
from functools import partial
from tests.harness.equivalence import deadlock_hunt as hunt
hunt.hunt(1, ["inprocess"], 1, limit=60)
hunt.Faults = partial(hunt.Faults, lost=lambda peer, notification, value: value == 2)
hunt.hunt(1, ["inprocess"], 1, limit=5)
"""


@pytest.mark.parametrize("tens", range(5))
def test_none_of_fifty_runs_hangs(tens: int) -> None:
    said = hunt.hunt(10, ["inprocess"], 10_000 + 10 * tens, limit=60)
    assert said.startswith("10 runs (10 inprocess): none hung, all ranks are equal")


@pytest.mark.parametrize("kind", ["shared", "tcp", "machines"])
def test_none_hangs_on_windows_between_processes(kind: str) -> None:
    assert hunt.hunt(5, [kind], 20_000, limit=60).startswith(f"5 runs (5 {kind}): none hung")


def test_a_run_that_hangs_is_shown_with_its_stacks() -> None:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = ServedPopen([sys.executable, "-c", LOSING], cwd=ROOT, text=True, **pipes)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.startswith("after 5 s this hasn't ended: Draw(seed=1, kind='inprocess'")
    assert 'paceline/reduce/put_engine/put_exchange.py"' in said
