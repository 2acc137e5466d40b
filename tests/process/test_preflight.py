"""Ranks that disagree, as real processes: one sentence with both values, and none goes on alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.harness.network.ports import free_port
from tests.harness.processes.command import Result
from tests.harness.processes.launcher_processes import (
    LoggedProcess,
    by_variables,
    rendezvous_variables,
    srun,
)
from tests.harness.processes.python_program import ROOT
from tests.harness.processes.tiny_run import make_database, train

HOST = os.uname().nodename


MODEL = """
from torch import nn

def small(num_labels, num_channels):
    layer = nn.Linear(32 * 32 * num_channels, num_labels)
    return nn.Sequential(nn.Flatten(), layer){}
"""

STOPS = """
import os, signal
from torch import nn

def small(num_labels, num_channels):
    if os.environ["SLURM_PROCID"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    return nn.Sequential(nn.Flatten(), nn.Linear(32 * 32 * num_channels, num_labels))
"""

OLD_TORCH = """
from importlib import metadata

real = metadata.version
metadata.version = lambda name: "2.0.1" if name == "torch" else real(name)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two databases: 15 images, and 18."""
    folder = tmp_path_factory.mktemp("data")
    make_database(folder, "train")
    make_database(folder, "other", each=6)
    return folder


def both(folder: Path, words: list[str], second: list[str]) -> list[Result]:
    """Train on two ranks of one node, the second with more words."""
    with srun(words, folder, each={1: second}) as programs:
        return [program.wait() for program in programs]


def refused(ends: list[Result], *told: str) -> None:
    assert [end.status for end in ends] == [2, 2], ends
    lines = [line for end in ends for line in end.text.splitlines(keepends=True)]
    text = "".join(line for line in lines if "ended because" not in line)  # whoever hears it first
    for words in told:
        assert text.count(words) == 1, text
    assert "Traceback" not in text


def test_different_flags_are_named_with_both_values(data: Path, tmp_path: Path) -> None:
    words = train(str(data / "train-lmdb"), "--run_id", "r")
    told = f"--batch_size is 4 on rank 0 ({HOST}) and 6 on rank 1 ({HOST}): give all machines the"
    refused(both(tmp_path, words, ["--batch_size", "6"]), told)


def test_different_data_are_named_with_both_values(data: Path, tmp_path: Path) -> None:
    words = train(str(data / "train-lmdb"), "--run_id", "r")
    told = f"--train_data's number of records is 15 on rank 0 ({HOST}) and 18 on rank 1 ({HOST})"
    refused(both(tmp_path, words, ["--train_data", str(data / "other-lmdb")]), told)


def test_a_model_that_differs_is_named_by_its_parameter(data: Path, tmp_path: Path) -> None:
    for name, change in (("a", ""), ("b", ".double()")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(MODEL.format(change))
    words = [*train(str(data / "train-lmdb"), "--run_id", "r"), "--model", "own:small"]
    words += ["--output_dir", str(tmp_path)]
    folders = [tmp_path / "a", tmp_path / "b"]
    with by_variables(words, folders, variables_by_hand()) as programs:
        ends = [program.wait() for program in programs]
    told = f"1.weight is [3, 3072] float32 on rank 0 ({HOST}) and [3, 3072] float64 on rank 1"
    refused(ends, told)


def test_another_version_is_named_with_both(data: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OLD_TORCH)
    words = train(str(data / "train-lmdb"), "--run_id", "r")
    first, second = variables_by_hand()
    second["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    second["PYTHONNODEBUGRANGES"] = "1"  # a process of its own, not a fork
    with by_variables(words, [tmp_path, tmp_path], [first, second]) as programs:
        ends = [program.wait() for program in programs]
    refused(ends, f"and 2.0.1 on rank 1 ({HOST}): install the same version on all machines.")


def test_two_supervised_machines_that_disagree_both_say_it(data: Path, tmp_path: Path) -> None:
    words = train(str(data / "train-lmdb"), "--run_id", "r", "--num_shards", "2")
    words += ["--master", f"127.0.0.1:{free_port()}"]
    own = (["--shard_id", "0"], ["--shard_id", "1", "--momentum", "0.5", "--output_dir", "out1"])
    machines = [LoggedProcess([sys.executable, *words, *more], tmp_path, {}) for more in own]
    ends = [machine.wait() for machine in machines]
    assert [end.status for end in ends] == [2, 2], ends
    told = f"--momentum is 0.9 on rank 0 ({HOST}) and 0.5 on rank 1 ({HOST})"
    assert all(end.text.count(told) == 1 for end in ends), ends


def test_a_rank_that_stops_in_the_start_is_named_within_the_limit(
    data: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(STOPS)
    words = train(str(data / "train-lmdb"), "--run_id", "r", "--first_iter_timeout", "10")
    with srun([*words, "--model", "own:small"], tmp_path) as programs:
        end = programs[0].wait()
    assert end.status == 1
    told = f"rank 1 on machine 0 ({HOST}) didn't report its model within 10 s: check its output."
    assert told in end.text
    assert "Traceback" not in end.text


def variables_by_hand() -> list[dict[str, str]]:
    """Return what two ranks are told by somebody who sets torchrun's variables."""
    world = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        **rendezvous_variables(),
    }
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
