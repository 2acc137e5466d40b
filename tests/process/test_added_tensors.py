"""Ranks that add other tensors to their models than their peers stop with a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.processes.launcher_commands import run

SCRIPT = ("-m", "tests.harness.library.added_tensors")


@pytest.mark.parametrize(("rank", "sync"), [(0, "allreduce"), (1, "notified")])
def test_a_rank_that_adds_a_layer_alone(tmp_path: Path, rank: int, sync: str) -> None:
    ended = run("paceline", *SCRIPT, "alone", str(rank), sync, folder=tmp_path)
    assert ended.status == 1, ended.text
    # Both ranks wait, each for the other; whose wait ends first isn't promised.
    sentence = (
        rf"rank {rank} (waited 3 s for|lost) a peer in world\.step\(\) with the "
        r"new 2\.probe\.bias, 2\.probe\.weight, which must be the same on all ranks"
    )
    assert len(re.findall(sentence, ended.text)) == 1, ended.text
    assert "Traceback" not in ended.text


@pytest.mark.parametrize("sync", ["allreduce", "notified"])
def test_ranks_that_add_other_layers(tmp_path: Path, sync: str) -> None:
    ended = run("paceline", *SCRIPT, "other", "1", sync, folder=tmp_path)
    assert ended.status == 2, ended.text
    heads, probes = (f"the new 2.{name}.bias, 2.{name}.weight" for name in ("head", "probe"))
    each = {
        f"world.step() with a changed model got {own} on rank {rank} and {other} on rank "
        f"{1 - rank}: register the same modules, parameters and buffers on all ranks."
        for rank, own, other in ((0, heads, probes), (1, probes, heads))
    }
    assert sum(ended.text.count(sentence) for sentence in each) == 1, ended.text
    assert "Traceback" not in ended.text
