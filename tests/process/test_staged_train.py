"""`paceline train --stages` as processes: on two machines, and continued by the same command."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.harness.equivalence.trainer_rollbacks import ToFloat64
from tests.harness.network.ports import free_port
from tests.harness.processes.command import Command, rows_of
from tests.harness.processes.fault_runs import EXACT, distance, load, proof_of
from tests.harness.processes.python_program import ROOT

WORDS = (
    *("train", "--train_data", "null", "--epoch_size", "20", "--image_size", "16"),
    *("--model", "tests.contract.test_staged_trainer:normed", "--num_labels", "3"),
    *("--augment", "none", "--decode_workers", "0", "--run_id", "r", "--microbatches", "4"),
    *("--base_learning_rate", "0.01", "--sync", "notified"),
)
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}


def test_two_machines_of_a_stage_each_continue_a_run_as_one_process_does(tmp_path: Path) -> None:
    whole = (*WORDS, "--batch_size", "8", "--num_epochs", "2")
    (tmp_path / "whole").mkdir()
    alone = Command(*whole, folder=tmp_path / "whole", environment=ENVIRONMENT).wait()
    assert alone.status == 0, alone.text
    text = ""
    for epochs in ("1", "2"):
        place = ("--num_shards", "2", "--master", f"127.0.0.1:{free_port()}")
        words = (*WORDS, "--batch_size", "4", "--num_epochs", epochs, "--stages", "2", *place)
        machines = []
        for number in range(2):
            folder = tmp_path / f"{number}"
            folder.mkdir(exist_ok=True)
            start = (*words, "--shard_id", str(number))
            machines.append(Command(*start, folder=folder, environment=ENVIRONMENT))
        ended = [machine.wait() for machine in machines]
        assert [one.status for one in ended] == [0, 0], ended
        text += ended[0].text
    assert text.count("1 replica of 2 stages on 2 machines") == 2
    assert "Resuming from runs/r/checkpoints/step-00000003.json: 1 epoch done." in text
    assert text.count("Pin this choice with --cuts ") == 1
    assert text.count("as at the first start of this run") == 1
    runs = [tmp_path / name / "runs" / "r" for name in ("0", "whole")]
    assert distance(*(load(folder / "normed_model.pt") for folder in runs)) < EXACT
    losses = [[f"{float(row['loss']):.5g}" for row in rows_of(folder)] for folder in runs]
    assert losses[0] == losses[1]
    assert proof_of(runs[0]).exact


class Slow(nn.Module):
    """A block that the second replica's processes compute more slowly."""

    def forward(self, x: Tensor) -> Tensor:
        second = json.loads(os.environ["PACELINE_WORKER"])["local_rank"] % 2
        time.sleep(len(x) * (0.01 if second else 0.001))
        return x


def slow(num_labels: int) -> nn.Module:
    """Make a net without batch statistics."""
    torch.manual_seed(3)
    layers = (nn.Flatten(), nn.Linear(3 * 16**2, 8), nn.Tanh(), nn.Linear(8, num_labels))
    return nn.Sequential(ToFloat64(), Slow(), *layers).double()


def test_shares_follow_the_speeds_of_whole_replicas_of_stages(tmp_path: Path) -> None:
    words = (*WORDS, "--model", f"{__name__}:slow", "--epoch_size", "240", "--batch_size", "24")
    words = (*words, "--num_epochs", "2")
    runs = []
    for name, flags in (
        ("whole", ()),
        ("cut", ("--num_workers", "4", "--stages", "2", "--cuts", "5", "--shares", "measured")),
    ):
        (tmp_path / name).mkdir()
        ended = Command(*words, *flags, folder=tmp_path / name, environment=ENVIRONMENT).wait()
        assert ended.status == 0, ended.text
        runs.append(tmp_path / name / "runs" / "r")
    assert "shares: " in ended.text
    assert distance(*(load(folder / "slow_model.pt") for folder in runs)) < EXACT
    assert proof_of(runs[1]).exact
