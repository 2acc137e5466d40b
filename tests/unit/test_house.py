"""The report on the house counts what it says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.harness.house import asks_for_kind, circles, main, measure, print_protocols
from tests.harness.layers import Module, import_graph, imports_upward, modules

SOURCE = """# What a comment is.
from collections.abc import Callable
from typing import Protocol

class Window(Protocol):
    size: int
    def put(self) -> None: ...
    def wait(self) -> None: ...

class Base:
    def __init__(self, done: Callable[[], None], clock: Callable[[], float]) -> None:
        self.size, self.done = 1, done  # not a comment of its own line
    def put(self) -> None: ...

class Local(Base):
    now: Callable[[int], None]
    def wait(self, report: Callable[[str], None] = lambda text: None) -> None:
        self.a, self.b = self.b, self.a
        if isinstance(self.a, Replica | AveragedReplica) or self.b.averaged:
            return
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    package = tmp_path / "paceline"
    (package / "comm").mkdir(parents=True)
    (package / "comm/window.py").write_text(SOURCE)
    (package / "comm/low.py").write_text("from paceline.comm import window\n")
    (package / "errors.py").write_text("def late():\n    import paceline.comm.low\n")
    return package


def test_a_file_is_measured(package: Path) -> None:
    counts = measure(Module(package / "comm/window.py", "comm/window"))
    assert counts == {
        "files": 1,
        "lines": len(SOURCE.splitlines()),
        "callables": 3,
        "stored": 2,  # not the clock
        "lambdas": 1,
        "packed": 2,
        "swaps": 1,
        "isinstance": 1,
        "comments": 1,
    }
    assert sum(map(asks_for_kind, ast.walk(ast.parse(SOURCE)))) == 2


def test_a_protocol_is_implemented_by_what_has_its_members(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_protocols(modules(package))
    assert capsys.readouterr().out.splitlines()[2].split() == ["Window", "3", "1", "Local"]


def test_imports_that_go_up_and_in_circles_are_found(package: Path) -> None:
    found = {module.name: module for module in modules(package)}
    assert imports_upward(found["errors"]) == {"comm"}
    assert not imports_upward(found["comm/low"])
    graph = import_graph(list(found.values()))
    assert graph == {"comm/low": {"comm/window"}, "comm/window": set(), "errors": {"comm/low"}}
    assert circles({**graph, "comm/window": {"errors"}}) == [set(graph)]
    assert not circles(graph)


def test_another_checkout_is_reported_and_a_package_is_drawn(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["house", "comm/", "--checkout", str(package.parent)])
    main()
    report = capsys.readouterr().out
    assert "arrows up: 1\n  errors → comm\n" in report
    assert "circles of packages: 0\n" in report
    assert "comm/low                                → comm/window\n" in report
