"""Code that asks for torch's default group, under launchers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.harness.processes.launcher_commands import run

SCRIPT = '''
import os
import signal
import sys

import torch
import torch.distributed as dist

import paceline
from tests.harness.library.small_training import BATCH, loss_of, network, samples, sgd


def reduce_mean(value):
    """As in the examples of torchvision: without a default group, one process's own."""
    if not dist.is_available() or not dist.is_initialized():
        return value
    dist.all_reduce(value)
    return value / dist.get_world_size()


world = paceline.join("run", default_group=True)
print(f"mean {reduce_mean(torch.tensor(float(world.rank))).item()}", flush=True)
everyone = [None] * world.world_size
dist.all_gather_object(everyone, world.rank)
assert everyone == [0, 1]
model = network()
optimizer = sgd(model)
paceline.parallelize(model, optimizer, world)
for x, y in paceline.loader(samples(), BATCH, world):
    with world.step():
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if sys.argv[1:] and world.steps == 2 and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
world.close()
assert not dist.is_initialized()
'''


@pytest.mark.parametrize("launcher", ["paceline", "torchrun"])
def test_a_guarded_mean_is_that_of_all_ranks(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run(launcher, str(tmp_path / "script.py"), folder=tmp_path)
    assert ended.status == 0, ended.text
    assert re.findall(r"mean (\S+)", ended.text) == ["0.5", "0.5"]


def test_the_loss_of_a_rank_ends_such_a_run_as_it_says_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run("paceline", str(tmp_path / "script.py"), "kill", folder=tmp_path)
    assert ended.status == 1, ended.text
    assert "with default_group=True the loss of a rank ends the run" in ended.text
    assert f"rank 1 on machine 0 ({os.uname().nodename}) was killed by SIGKILL" in ended.text
    assert "Traceback" not in ended.text
