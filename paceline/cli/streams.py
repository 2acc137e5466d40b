"""Standard streams of a command: closed at its start, without a reader, or not in UTF-8."""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress


def prepare_streams() -> None:
    """Make the standard streams usable for any text.

    A closed stream, as after `>&-`, becomes the null device; otherwise files and connections would
    get its number. Characters that a stream's encoding lacks are written as `?`.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode))  # noqa: SIM115  # open until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # a stream that was read can't change
            sys.stdout.reconfigure(errors="replace")


def reader_is_gone() -> bool:
    """Return whether the reader has closed its end of the output, as in `paceline … | head`."""
    poll = select.poll()
    try:
        poll.register(sys.stdout, 0)
    except OSError:  # it is no file
        return False
    return bool(poll.poll(0))


def discard_unwritten() -> None:
    """Discard output that can't be written, so that the interpreter's exit raises no error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
