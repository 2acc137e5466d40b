"""The standard streams of a command: closed before it starts, or read by nobody any more."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress


def open_closed() -> None:
    """Open what was closed, as by `>&-`, or files and connections would take those numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode))  # noqa: SIM115  # as long as the process lives


def nobody_reads() -> bool:
    """Tell whether the output's reader has seen enough, as in `paceline db info … | head`."""
    poll = select.poll()
    try:
        poll.register(sys.stdout, 0)
    except OSError:  # it is no file
        return False
    return bool(poll.poll(0))


def give_up() -> None:
    """Let what can't be written be no error once more when the process exits."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
