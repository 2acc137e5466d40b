"""A rank dies or freezes in mid-step: what those say who have no supervisor to tell them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.processes.bad_inputs import no_process_left
from tests.harness.processes.launcher_processes import (
    by_variables,
    rendezvous_variables,
    srun_variables,
)
from tests.harness.processes.run_folders import wait_until

LOST, STEP = 2, 3  # who, and in which step
OWN = f'''
import os, signal
from torch import nn


class Net(nn.Module):
    """A net of several buckets, in one of whose steps a rank sends itself a signal."""

    def __init__(self, num_labels, number, moment):
        super().__init__()
        self.first, self.last = nn.Linear(48, 40), nn.Linear(40, num_labels)
        self.pool = nn.Sequential(nn.AvgPool2d(8), nn.Flatten())
        self.number, self.moment, self.step = number, moment, 0

    def hurt(self, moment):
        own = os.environ["SLURM_PROCID"] == "{LOST}"
        if own and (moment, self.step) == (self.moment, {STEP}):
            open("hurt", "w").close()
            os.kill(os.getpid(), self.number)

    def forward(self, images):
        hidden = self.first(self.pool(images)).tanh()
        self.hurt("forward")
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.backward_reached())
        return self.last(hidden)

    def backward_reached(self):
        self.hurt("backward")
        self.step += 1


def dies_in_forward(num_labels):
    return Net(num_labels, signal.SIGKILL, "forward")


def dies_in_backward(num_labels):
    return Net(num_labels, signal.SIGKILL, "backward")


def freezes_in_backward(num_labels):
    return Net(num_labels, signal.SIGSTOP, "backward")
'''
WORDS = (
    *("-m", "paceline.cli.main", "train", "--train_data", "null", "--epoch_size", "90"),
    *("--image_size", "32", "--augment", "none", "--num_labels", "3", "--batch_size", "6"),
    *("--use_cpu", "--run_id", "r", "--sync", "notified", "--bucket_mb", "0.001"),
)
LIMIT = 40.0  # less than the default time-out: who waits for that fails the test


@pytest.mark.parametrize(
    ("nodes", "model", "said"),
    [
        ((3,), "dies_in_forward", "lost (rank 2|a peer) in .*step [23]: "),
        ((2, 1), "dies_in_backward", "lost (rank 2|a peer) in .*step [23]: "),
        ((1, 1, 1), "freezes_in_backward", "waited 3 s for (rank 2|a peer) in .*step [23]: "),
    ],
    ids=str,
)
def test_survivors_name_the_rank_that_was_lost_and_what_it_was_needed_for(
    tmp_path: Path, nodes: tuple[int, ...], model: str, said: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = [*WORDS, "--model", f"own:{model}"]
    words += ["--timeout", "3"] if "freezes" in model else []
    with no_process_left() as mark:
        variables = [
            {**own, **rendezvous, **mark}
            for rendezvous in [rendezvous_variables()]
            for own in srun_variables(nodes)
        ]
        folders = [tmp_path] * len(variables)
        with by_variables(words, folders, variables) as programs:
            wait_until((tmp_path / "hurt").exists)
            lost = programs.pop(LOST)
            ends = [program.wait(LIMIT) for program in programs]
            lost.kill()
    for end in ends:
        assert end.status == 1, end
        assert "Traceback" not in end.text
        assert re.search(said, end.text), end.text
        assert end.text.splitlines()[-1].startswith("paceline: rank ")
