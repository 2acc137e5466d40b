"""Folders that a test may not write, or not even read, though root runs it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def read_only(*folders: Path) -> Iterator[None]:
    """Take the right to write in `folders`."""
    with _limited(folders, 0o555):
        yield


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Take all rights to a folder."""
    with _limited([folder], 0):
        yield


@contextmanager
def _limited(folders: Sequence[Path], mode: int) -> Iterator[None]:
    """Change the folders' mode, and be somebody else than root, whom nothing is closed to."""
    root = os.geteuid() == 0
    for folder in folders:
        folder.chmod(mode)
    try:
        if root:
            for parent in folders[0].parents[:4]:  # pytest's own are closed to others
                parent.chmod(parent.stat().st_mode | 0o055)
            os.seteuid(NOBODY)
        yield
    finally:
        if root:
            os.seteuid(0)
        for folder in folders:
            folder.chmod(0o755)
