"""A run's folder is one process's from `open` to `close`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.state.run_folder import RunFolder

LOCKER = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("locked", flush=True)
sys.stdin.read()
"""


def locker(folder: Path) -> subprocess.Popen[str]:
    """Start another process, which takes the folder's lock until its input ends, or fails."""
    command = [sys.executable, "-I", "-S", "-c", LOCKER, str(folder / ".alive.0")]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_folder_is_locked_from_open_to_close(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", shard_id=0)
    folder.close()  # it has no lock yet
    folder.open({"seed": 0})
    _, error = locker(folder.path).communicate()
    assert "BlockingIOError" in error
    folder.close()
    assert not (folder.path / ".alive.0").exists()
    folder.close()


def test_a_folder_that_another_process_has_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, shard_id=0)
    with locker(tmp_path) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        for take in (folder.check, folder.open):
            with pytest.raises(ConfigError, match="this run is active on this machine"):
                take({"seed": 0})
        other.communicate("")
    folder.check({"seed": 0})  # what a dead start left
    assert not (tmp_path / ".alive.0").exists()
    folder.open({"seed": 0})
    folder.close()
