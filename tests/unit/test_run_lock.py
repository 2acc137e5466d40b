"""A run's folder is one process's from `open` to `close`."""

from __future__ import annotations

import socket
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


HOLDER = """
import sys
from pathlib import Path
from paceline.state.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), shard_id=0)
folder.hold(int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
folder.close()
"""


def holder(folder: Path, local_rank: int) -> subprocess.Popen[str]:
    """Start a worker, which holds the folder until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(folder), str(local_rank)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_workers_hold_the_folder_of_a_dead_supervisor(tmp_path: Path) -> None:
    supervisor = RunFolder(tmp_path, shard_id=0)
    supervisor.open({"seed": 0})
    with holder(tmp_path, 0) as first, holder(tmp_path, 1) as second:
        supervisor.close()  # as the kernel does for a killed process
        for worker in (first, second):
            with pytest.raises(ConfigError) as refused:
                RunFolder(tmp_path, shard_id=0).open({"seed": 0})
            text = str(refused.value)
            assert f"(process {worker.pid} on {socket.gethostname()})" in text
            assert f"end it with `paceline stop {tmp_path}`" in text
            worker.communicate("")
    assert not (tmp_path / ".alive.0").exists()
    RunFolder(tmp_path, shard_id=0).open({"seed": 0})


def test_a_worker_doesnt_hold_what_another_process_has(tmp_path: Path) -> None:
    with locker(tmp_path) as other:  # all bytes
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match="this run is active on this machine"):
            RunFolder(tmp_path, shard_id=0).hold(0)
        other.communicate("")
