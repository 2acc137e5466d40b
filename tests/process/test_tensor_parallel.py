"""Tensor ranks, as processes: their shards train as the whole model does in one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.processes.launcher_commands import run

SCRIPT = ("-m", "tests.harness.library.tensor_script")
EXACT = 1e-10


@pytest.mark.parametrize(("way", "ranks", "cases"), [("notified", 2, "012"), ("allreduce", 4, "2")])
def test_divided_models_train_as_whole_ones(
    tmp_path: Path, way: str, ranks: int, cases: str
) -> None:
    ended = run("paceline", *SCRIPT, way, *cases, folder=tmp_path, ranks=ranks)
    assert ended.status == 0, ended.text
    found = re.findall(r"(\S+) off", ended.text)
    assert len(found) == len(cases) * ranks, ended.text
    assert all(float(far) < EXACT for far in found), ended.text
    shares = [float(share) for share in re.findall(r": (\d\.\d\d),", ended.text)]
    assert max(shares) < 0.6, ended.text  # of the whole model


def test_a_replica_that_loses_a_tensor_rank_leaves_and_the_other_continues(tmp_path: Path) -> None:
    ended = run("paceline", *SCRIPT, "notified-kill", "2", folder=tmp_path, ranks=4)
    assert ended.status == 0, ended.text
    assert "Traceback" not in ended.text
    assert ended.text.count(". 2 processes continue from step ") == 1
    found = re.findall(r"(\S+) off", ended.text)
    assert len(found) == 2, ended.text
    assert all(float(far) < EXACT for far in found), ended.text
