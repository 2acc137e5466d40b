"""The tests of a broken copy are run as the copy's own, with an end, and nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.processes.python_program import ROOT

SCRIPT = """
import sys
from pathlib import Path
from tests.harness.broken_copy import adopt_orphans, noticed_by

adopt_orphans()
print(noticed_by(Path(sys.argv[1]), sys.argv[3:], float(sys.argv[2])))
"""

TESTS = """
import os, subprocess, sys, time
from pathlib import Path
import paceline

def test_own():
    assert Path(paceline.__file__).parent == Path(__file__).parent / "paceline"

def test_of_a_child():
    code = "import paceline; print(paceline.__file__)"
    child = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert child.stdout.startswith(str(Path(__file__).parent))

def test_broken():
    assert not "broken"

def test_that_leaves_processes():
    code = "import os, time; os.fork(); os.write(1, b'%d ' % os.getpid()); time.sleep(1000)"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    pids = b""
    while pids.count(b" ") < 2:
        pids += os.read(child.stdout.fileno(), 100)
    Path("left").write_bytes(pids)
    child.returncode = 0  # no warning

def test_that_hangs():
    time.sleep(1000)
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A repository with a package, tests and an environment."""
    (tmp_path / "paceline").mkdir()
    (tmp_path / "paceline/__init__.py").touch()
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def noticed(copy: Path, *tests: str, limit: float = 100) -> str:
    command = [sys.executable, "-c", SCRIPT, str(copy), str(limit), *tests]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_the_test_that_fails_is_named(copy: Path) -> None:
    own = "test_it.py::test_own", "test_it.py::test_of_a_child"
    assert noticed(copy, *own) == "\n"
    assert noticed(copy, *own, "test_it.py::test_broken") == "FAILED test_it.py::test_broken\n"


def test_what_a_test_leaves_behind_is_ended(copy: Path) -> None:
    assert noticed(copy, "test_it.py::test_that_leaves_processes") == "\n"
    pids = (copy / "left").read_text().split()
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_hang_is_noticed(copy: Path) -> None:
    assert noticed(copy, "test_it.py::test_that_hangs", limit=3) == "no end in 3 s\n"
