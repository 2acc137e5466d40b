"""Lines for the user on standard error, from any process of a run."""

from __future__ import annotations

import sys
from contextlib import suppress

from paceline.errors import Message


def print_message(text: str | Message) -> None:
    """Print a line for the user, on standard error, if there is one."""
    with suppress(OSError):
        erase = "\r\x1b[2K" if sys.stderr.isatty() else ""  # of a worker's progress, or of ^C
        line = f"{erase}paceline: {text}\n"  # in one write, also where streams are unbuffered
        print(line, end="", file=sys.stderr, flush=True)
