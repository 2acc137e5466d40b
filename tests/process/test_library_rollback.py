"""A script's loop goes back to a snapshot in the same processes, whenever its generation ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import ledger
from paceline.state.run_folder import next_generation
from tests.harness.library.rollback_script import CASES, EPOCHS, RANKS
from tests.harness.processes.launcher_commands import run
from tests.harness.processes.run_folders import events

SCRIPT = ("-m", "tests.harness.library.rollback_script")


def test_a_loop_whose_generations_end_in_mid_step_trains_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run("paceline", *SCRIPT, "runs", *CASES, folder=tmp_path)
    assert ended.status == 0, ended.text
    for name in CASES:
        assert ended.text.count(f"{name}: equal") == RANKS
    for name in CASES:
        capsys.readouterr()
        assert ledger.main([str(tmp_path / "runs" / name), "--json"]) == 0
        proof = json.loads(capsys.readouterr().out)
        assert [one["once"] for one in proof["accounts"]] == [50] * EPOCHS
        folder = tmp_path / "runs" / name
        for rank in range(RANKS):
            lines = events(folder, rank)
            started = [line["generation"] for line in lines if line["event"] == "run"]
            assert started[-5:] == [1, 2, 3, 4, 5]  # 0 may end before its first step is recorded
            assert {line["generation"] for line in lines if line["event"] == "step"} <= {*range(6)}
        assert next_generation(folder) == 6
