"""A script's averaging run that is stopped in mid-round resumes with each worker's own state."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.harness.processes.launcher_commands import run

SCRIPT = ("-m", "tests.harness.library.averaged_script")


def test_each_worker_resumes_with_its_own_weights_and_momenta(tmp_path: Path) -> None:
    ranks = []
    for name, stops in (("straight", [-1]), ("stopped", [8, -1])):  # a merge is under way at 8
        folder = tmp_path / name
        folder.mkdir()
        for stop in stops:
            ended = run("paceline", *SCRIPT, str(folder), str(stop), folder=tmp_path)
            assert ended.status == (0 if stop == -1 else 3), ended.text
        ranks.append([torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)])
    for straight, resumed in zip(*ranks, strict=True):
        for one, other in zip(straight, resumed, strict=True):
            assert torch.equal(one, other)
    first, second = ranks[0]
    assert not torch.equal(first[0], second[0])  # each has its own
