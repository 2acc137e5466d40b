"""Atomic writes: a file appears under its name complete and durable, or not at all.

    .NAME.<random>.part ── written, fsync ── rename ──▶ NAME ── fsync of the folder

A reader finds the old file or the new one, after a power cut too. The temporary name is unique,
because machines may share a folder. A killed writer leaves a `.part` file behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from paceline.errors import Message, PacelineError

PARTS = ".*.part"  # a pattern of what a killed writer leaves


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically; text is written as UTF-8.

    Raises:
        OSError: the disk is full, or the folder can't be written; the old file is as it was.
    """
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: Path, require: Callable[[], None] = lambda: None) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `path` when the block ends without an error.

    Args:
        require: called when the whole file is on the disk, immediately before it becomes `path`; an
            error of it prevents that.

    Raises:
        OSError: as in `write_atomically`; also where another error of the block is due to one, as
            those of torch's writer are.
    """
    part = _part_of(path)
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        require()
        part.replace(path)
        sync(path.parent)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if (cause := _disk_error(error)) is not None:
            raise cause from None
        raise


def link_atomically(path: Path, name: Path) -> None:
    """Give a file a second name, which outlives the first; a copy where links aren't possible.

    Raises:
        OSError: the folder can't be written; what had the name before is as it was.
    """
    part = _part_of(name)
    try:
        os.link(path, part)
    except OSError:
        write_atomically(name, path.read_bytes())
        return
    part.replace(name)
    sync(name.parent)


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explained_writes(path: Path) -> Iterator[None]:
    """Turn an `OSError` of the block, which writes `path`, into a sentence.

    Raises:
        PacelineError: the file can't be written.
    """
    try:
        yield
    except OSError as error:
        raise PacelineError(
            Message(
                "{} can't be written ({}): make room, or give another {--output_dir}.",
                path,
                error.strerror or error,
            )
        ) from error


def _part_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")


def _disk_error(error: BaseException | None) -> OSError | None:
    """Find the `OSError` behind an error."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
