"""Map of the functions that each test calls: a pytest plugin, and what reads its files.

    CALL_MAP=folder .venv/bin/pytest -p tests.harness.call_map tests/unit tests/contract

Each process of the tests writes one file into the folder: the seconds of each of its tests, and the
functions of the product that the test called, in all threads. Child processes are not traced, and a
function that is called once in a process (one that is cached) counts for its first test only. The
map says which tests to run first; it does not say that no other test depends on a function.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import pytest

_PRODUCT = str(Path(__file__).parents[2] / "paceline") + os.sep

Function = tuple[str, int]
"""A file, relative to the repository, and the first line of a function (its decorators' too)."""


@dataclass
class _Record:
    """What the tests of this process called."""

    tests: dict[str, tuple[float, set[Function]]] = field(default_factory=dict)
    called: set[tuple[str, int]] = field(default_factory=set)


_record = _Record()


def _trace(frame: FrameType, event: str, arg: object) -> None:
    """Note the call of a function; its lines are not traced."""
    code = frame.f_code
    if code.co_filename.startswith(_PRODUCT):
        _record.called.add((code.co_filename, code.co_firstlineno))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Trace one test, its fixtures included."""
    _record.called, started = set(), time.monotonic()
    threading.settrace(_trace)
    sys.settrace(_trace)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        called = {(f"paceline/{path[len(_PRODUCT) :]}", line) for path, line in _record.called}
        _record.tests[item.nodeid] = (time.monotonic() - started, called)


def pytest_sessionfinish() -> None:
    """Write the file of this process."""
    tests = {test: (round(s, 3), sorted(calls)) for test, (s, calls) in _record.tests.items()}
    if tests:
        path = Path(os.environ["CALL_MAP"]) / f"{os.getpid()}.json"
        path.write_text(json.dumps(tests))


class CallMap:
    """Map of calls: for each function of the product, the tests that called it.

    Args:
        folder: the folder with the files of the plugin.
    """

    def __init__(self, folder: Path) -> None:
        self.seconds: dict[str, float] = {}
        self._callers: dict[Function, set[str]] = {}
        for path in sorted(folder.glob("*.json")):
            for test, (seconds, called) in json.loads(path.read_text()).items():
                self.seconds[test] = seconds
                for file, line in called:
                    self._callers.setdefault((file, line), set()).add(test)

    def callers(self, root: Path, path: Path, line: int, budget: float) -> list[str]:
        """Return the tests that called the function around a line, the fastest first.

        A line outside all functions counts for all functions of its file.

        Args:
            root: the repository.
            path: the file, relative to it.
            line: the line.
            budget: the seconds that the tests together may take. One test may take a fifth.
        """
        around = _function_at(ast.parse((root / path).read_text()), line)
        found = {
            test
            for (file, first), tests in self._callers.items()
            if file == str(path) and around in (None, first)
            for test in tests
        }
        chosen, left = [], budget
        for test in sorted(found, key=lambda test: (self.seconds[test], test)):
            left -= self.seconds[test]
            if left < 0 or self.seconds[test] > budget / 5:
                break
            chosen.append(test)
        return chosen


def _function_at(tree: ast.AST, line: int) -> int | None:
    """Return the first line of the innermost function around a line."""
    found: int | None = None
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in functions:  # outer functions come first
        if node.body[0].lineno <= line <= (node.end_lineno or 0):
            found = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return found
