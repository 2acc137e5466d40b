"""Keeps Python's collector of garbage away from what stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept() -> Iterator[None]:
    """Let what the block makes stay until the process ends, and never be looked through.

    Importing torch makes a million objects, none of which is garbage. The collector, which would go
    through them time and again and once more at the end, takes half of such a process's time.
    """
    if not gc.isenabled():  # somebody sees to it
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
