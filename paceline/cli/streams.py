"""Standard streams of a command: closed at its start, without a reader, or not in UTF-8."""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from contextlib import suppress

_PATHS = "paceline.paths"  # the name of what writes characters that an encoding lacks


def prepare_streams() -> None:
    """Make the standard streams usable for any text.

    A closed stream, as after `>&-`, becomes the null device; otherwise files and connections would
    get its number. Bytes of paths that are no text are read and written as they are; characters
    that the output's encoding lacks are written as `?`.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode))  # noqa: SIM115  # open until the process ends
    codecs.register_error(_PATHS, _bytes_of)
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, _PATHS)):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # a stream that was read can't change
                stream.reconfigure(errors=errors)


def _bytes_of(error: UnicodeError) -> tuple[bytes, int]:
    """Return the bytes that surrogates stand for, see PEP 383, and `?` for other characters."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    codes = (ord(one) - 0xDC00 for one in lacking)
    return bytes(code if 0x80 <= code <= 0xFF else ord("?") for code in codes), error.end


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
