"""A disk that is soon full: a small tmpfs. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted tmpfs.

    Args:
        path: where it is mounted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, leave: int) -> None:
        """Write a file that leaves so many bytes free."""
        room = os.statvfs(self.path)
        with (self.path / "filler").open("wb") as file:
            file.write(bytes(room.f_bavail * room.f_bsize - leave))

    def make_room(self) -> None:
        """Make the disk large enough for everything."""
        (self.path / "filler").unlink(missing_ok=True)
        _run("mount", "-o", "remount,size=64m", str(self.path))


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[SmallDisk]:
    """Mount one at `path` inside the block; skips the test where the machine can't."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    path.mkdir()
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no small disk here: {error.stderr.decode().strip()}")
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "--lazy", str(path))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
