"""Runs the benchmarks, and reads the tables that they print."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes.fork_server import ServedPopen

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
INTERVAL = re.compile(r"\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)")
RATIO = re.compile(r"\d+\.\d{3} \(\d+\.\d{3} to \d+\.\d{3}\)")
SAME = "1.00 (1.00 to 1.00)"
LIMIT = 100


def benchmark(name: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a benchmark."""
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    return ServedPopen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def load(name: str) -> Any:
    """Import a module of the benchmarks into this process."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return import_module(name)


def printed(name: str, *arguments: str) -> str:
    """Run a benchmark to its good end; return what it printed."""
    with benchmark(name, *arguments) as process:
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    return out


def table(out: str) -> dict[str, list[str]]:
    """Return the cells of each row of the only table that was printed with --markdown."""
    lines = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("|")]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines[2:]}


def carried(out: str) -> list[float]:
    """Return what plain streams carried, in Gbit/s, a link each."""
    return [float(rate) for rate in re.findall(r"carries ([\d.]+) Gbit/s", out)]


def need_shaped_links() -> None:
    """Skip the test where this machine can't shape links, but never in CI."""
    if os.geteuid() != 0 or shutil.which("tc") is None:
        assert os.environ.get("CI") != "true", "CI must run this test as root, with iproute2"
        pytest.skip("shaped links need root and iproute2")
