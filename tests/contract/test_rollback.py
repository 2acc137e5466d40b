"""Going back to a snapshot over real connections: contexts end in mid-step, and others go on."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.harness.equivalence.rollbacks import CONFIGS, Rollbacks, drawn
from tests.harness.processes.command import Running
from tests.harness.processes.python_program import ROOT


@pytest.mark.parametrize("machines", [(1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_contexts_that_end_in_mid_step_change_no_bit(name: str, machines: tuple[int, ...]) -> None:
    config, steps = CONFIGS[name], 14
    plain = Rollbacks(config, machines, steps).run()
    for seed in range(2):
        moments = drawn(seed, 3, sum(machines), steps)
        states = Rollbacks(config, machines, steps, moments).run()
        for one, other in zip(states, plain, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one), moments


@pytest.mark.timeout(240)
@pytest.mark.parametrize("sync", ["allreduce", "notified"])
def test_many_contexts_leave_nothing_behind(sync: str) -> None:
    # Eight contexts after the first four show a descriptor, thread or mapping that each leaves.
    words = ["--sync", sync, "--contexts", "12"]
    command = (sys.executable, "-m", "tests.harness.equivalence.rollbacks", *words)
    ended = Running(command, folder=ROOT, variables={}).wait(200)
    assert ended.status == 0, ended.text
    assert ended.text.endswith("equal\n")
