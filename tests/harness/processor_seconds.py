"""Processor seconds of the tests, by file: a pytest plugin, for `make test` and for one file alike.

    .venv/bin/pytest -p tests.harness.processor_seconds tests/process

A test's seconds are those of its process since the test before, of its two servers of forks, and of
all child processes that ended since then. They do not depend on what else runs on the machine, as
wall time does.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Generator, Iterator
from multiprocessing.forkserver import _forkserver  # type: ignore[attr-defined]
from pathlib import Path

import pytest

from tests.harness.processes.fork_server import server

_KEY = "processor_seconds"
_spent = 0.0  # of this process and its children, up to the last report
_files: Counter[str] = Counter()
_tests: Counter[str] = Counter()


def _seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ended = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return ended + sum(map(_of_server, _servers()))


def _servers() -> Iterator[int]:
    """Yield the processes that fork others for this one; they are its children to its end."""
    if server.cache_info().currsize:
        yield server().pid
    if _forkserver._forkserver_pid is not None:
        yield _forkserver._forkserver_pid


def _of_server(pid: int) -> float:
    """Return the seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note the seconds since the test before in the report of the last phase."""
    global _spent
    report = yield
    if report.when == "teardown":
        now = _seconds()
        report.user_properties.append((_KEY, now - _spent))
        _spent = now
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Sum up, in the process that prints the summary."""
    seconds = sum(value for key, value in report.user_properties if key == _KEY)
    _files[report.nodeid.partition("::")[0]] += seconds
    _tests[report.nodeid] += seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the caller ask for a longer table."""
    parser.addoption("--most-expensive", type=int, default=12, help="files and tests to list")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the seconds of each folder, and of its most expensive files."""
    folders: Counter[str] = Counter()
    for file, seconds in _files.items():
        folders[str(Path(file).parent)] += seconds
    terminalreporter.section("processor seconds")
    for folder, seconds in sorted(folders.items()):
        terminalreporter.line(f"{seconds:8.1f}  {folder}")
    terminalreporter.line(f"{sum(folders.values()):8.1f}  in all")
    for name, table in (("files", _files), ("tests", _tests)):
        terminalreporter.line(f"the most expensive {name}:")
        for item, seconds in table.most_common(config.getoption("--most-expensive")):
            terminalreporter.line(f"{seconds:8.1f}  {item}")
