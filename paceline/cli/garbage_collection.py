"""Keeps the objects that importing torch makes out of Python's garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Exclude the objects that the block makes from garbage collection until the process ends.

    The import of torch makes a million objects, none of which is garbage. Repeated collections
    would traverse them and take half of the time of a short process.
    """
    if not gc.isenabled():  # the caller manages collection
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
