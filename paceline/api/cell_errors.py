"""Errors that end a cell of a notebook, or a statement of a REPL, in the middle of a loop.

    for x, y in loader:
        if enough: break        the epoch ends
        x = x.to(devcie)        an error: the next `for` continues the epoch, or the next start does

A generator learns that its loop has ended, but not why. An interactive interpreter shows the error
of a statement and stores it in `sys.last_value`.
"""

from __future__ import annotations

import sys


class CellErrors:
    """Detector of an error that ended a cell since a moment.

    Args:
        interactive: whether a user types statements or runs cells here; otherwise none is detected.
    """

    def __init__(self, *, interactive: bool) -> None:
        self._interactive = interactive
        self.begin()

    def begin(self) -> None:
        """Detect errors from now on."""
        self._last = _last_error()

    @property
    def any(self) -> bool:
        """Whether the interpreter has shown an error since `begin`, a `KeyboardInterrupt` say."""
        return self._interactive and _last_error() != self._last


def _last_error() -> int:
    """Return the id of the last error that was shown, whose frames are not to be kept alive."""
    return id(getattr(sys, "last_value", None))
