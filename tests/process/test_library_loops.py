"""Loops that people have train on several ranks as they do in plain torch, to 1e-10."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness.library import loops, several_models
from tests.harness.library.loops import sync_of
from tests.harness.processes.launcher_commands import run


@pytest.fixture(scope="module", params=[loops, several_models], ids=["one model", "several models"])
def plain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModuleType, Path]:
    """Loops, and the file of their results in plain torch, which all ranks read."""
    path = tmp_path_factory.mktemp("plain") / "results.pt"
    ended = run("python", "-m", request.param.__name__, str(path), folder=path.parent)
    assert ended.status == 0, ended.text
    return request.param, path


@pytest.mark.parametrize("ranks", [2, 3])
def test_loops_train_as_in_plain_torch(
    tmp_path: Path, plain: tuple[ModuleType, Path], ranks: int
) -> None:
    loops, path = plain
    ended = run("paceline", "-m", loops.__name__, str(path), folder=tmp_path, ranks=ranks)
    assert ended.status == 0, ended.text
    lines = re.findall(r"^rank (\d+) (\w+) (\w+) (\S+)$", ended.text, re.M)
    expected = {
        (str(rank), name, sync_of(number, ranks))
        for rank in range(ranks)
        for number, name in enumerate(loops.LOOPS)
    }
    assert {line[:3] for line in lines} == expected
    assert [line for line in lines if not float(line[3]) < 1e-10] == []
