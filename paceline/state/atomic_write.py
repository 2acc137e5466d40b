"""Files that are written at once or not at all: beside their place, synced to the disk, renamed.

A reader, after a power cut too, finds the old file or the new one, whole.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save_atomically(path: Path, value: Any) -> None:
    """Write what `torch.load` reads, at once or not at all.

    Raises:
        OSError: the disk is full, or the folder can't be written; the old file is as it was.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if (cause := _disk_error(error)) is not None:
            raise cause from None
        raise


def _disk_error(error: BaseException | None) -> OSError | None:
    """Find what torch's writer, which speaks of unexpected positions, stumbled over."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
