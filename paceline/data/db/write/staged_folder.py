"""A folder appears under its final name whole or not at all.

    .cats.creating/lock     held (flock) by the process that writes; free once it is dead
    .cats.creating/db/      written here, beside its final place and so on the same disk
    cats/                   db/ renamed, after everything in it is on the disk

A killed writer leaves `.cats.creating`, which the next writer of `cats` finds unlocked and clears.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.atomic_write import sync
from paceline.errors import ConfigError


def check_destination(dest: Path) -> None:
    """Make sure that nothing would be overwritten.

    Raises:
        ConfigError: `dest` is a file or a folder with something in it.
    """
    if dest.is_dir():
        if any(dest.iterdir()):
            raise ConfigError(f"{dest} isn't empty: give another name, or remove it first.")
    elif dest.exists():
        raise ConfigError(f"{dest} is a file: give the name of a new folder.")


@contextmanager
def staged(dest: Path) -> Iterator[Path]:
    """Give an empty folder that becomes `dest` when the block ends well, and vanishes otherwise.

    Raises:
        ConfigError: another process is writing `dest` now.
        OSError: the disk is full, or the place isn't writable.
    """
    final = dest.resolve()
    workshop = final.parent / f".{final.name}.creating"
    folder = workshop / "db"
    with _locked(workshop, dest):
        _remove(folder)  # a killed writer's
        folder.mkdir()
        try:
            yield folder
            for path in (*folder.rglob("*"), folder):
                sync(path)
            folder.rename(final)
            sync(final.parent)
        finally:
            _remove(folder)


@contextmanager
def _locked(workshop: Path, dest: Path) -> Iterator[None]:
    """Have the workshop, made if need be, to ourselves; leave none behind."""
    path = workshop / "lock"
    lock = _acquire(path, dest)
    try:
        yield
    finally:
        path.unlink()  # still locked: a process that has opened it finds a new one
        os.close(lock)
        with suppress(OSError):  # not empty: the next writer has come in
            workshop.rmdir()


def _acquire(path: Path, dest: Path) -> int:
    """Make and lock a file; the lock is the returned descriptor's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    busy = ConfigError(f"{dest} is being written by another process: wait until it has finished.")
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:  # the folder is gone again: its owner has just finished
        raise busy from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    raise busy


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
