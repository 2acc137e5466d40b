"""Ranks whose optimizers of several models don't step alike stop with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.processes.launcher_commands import run


@pytest.mark.parametrize("sync", ["allreduce", "notified"])
@pytest.mark.parametrize(("blocks", "step"), [("1", 3), ("2", 4)])
def test_an_update_that_one_rank_leaves_out(
    tmp_path: Path, blocks: str, step: int, sync: str
) -> None:
    script = ("-m", "tests.harness.library.skipped_step", blocks, sync)
    ended = run("paceline", *script, folder=tmp_path, ranks=2)
    assert ended.status == 2, ended.text
    sentence = f"in step {step} optimizer.step() was called on rank 0, but not on rank 1: call it"
    assert sentence in ended.text
    assert "Traceback" not in ended.text
