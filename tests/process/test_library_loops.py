"""Loops that people have train on several ranks as they do in plain torch, to 1e-10."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness.library import loops, several_models
from tests.harness.library.loops import sync_of
from tests.harness.processes.launcher_commands import run


@pytest.mark.parametrize("loops", [loops, several_models], ids=["one model", "several models"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_loops_train_as_in_plain_torch(tmp_path: Path, ranks: int, loops: ModuleType) -> None:
    ended = run("paceline", "-m", loops.__name__, folder=tmp_path, ranks=ranks)
    assert ended.status == 0, ended.text
    lines = re.findall(r"^rank (\d+) (\w+) (\w+) (\S+)$", ended.text, re.M)
    expected = {
        (str(rank), name, sync_of(number, ranks))
        for rank in range(ranks)
        for number, name in enumerate(loops.LOOPS)
    }
    assert {line[:3] for line in lines} == expected
    assert [line for line in lines if not float(line[3]) < 1e-10] == []
