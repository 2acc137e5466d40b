"""What numba compiles runs where it can be kept nowhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from numba.core import config

from paceline.comm.numba_compiler import compiler
from tests.harness.data.small_disk import small_disk

SOURCE = "def twice(x):\n    return 2 * x\n"


@pytest.fixture
def twice(tmp_path: Path) -> Any:
    """A function with a file of its own, as numba asks for."""
    path = tmp_path / "source.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("source", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.twice


def keep_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(folder))


def found_after(function: Any) -> int:
    """Compile as a new process would, and call; return how often the cache had it."""
    compiled = compiler()(function)
    assert compiled(21) == 42
    return sum(compiled.stats.cache_hits.values())


def test_a_full_disk_is_no_reason_to_end(
    twice: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        keep_in(disk.path / "cache", monkeypatch)
        disk.fill(leave=8192)
        assert found_after(twice) == 0


def test_what_can_be_kept_nowhere_is_compiled_all_the_same() -> None:
    names: dict[str, Any] = {}
    exec(compile(SOURCE, "nowhere.py", "exec"), names)
    assert found_after(names["twice"]) == 0
