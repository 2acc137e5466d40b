"""A script's loop goes back to a snapshot in the same processes, whenever its generation ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import ledger
from tests.harness.library.rollback_script import CASES, EPOCHS, RANKS
from tests.harness.processes.launcher_commands import run

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
