"""A person's terminal or a pipe: lines that stay, and one status that doesn't.

On a terminal the status is one line, drawn over by what comes next; no other property of the
terminal is changed, so that even a killed process leaves it in order. In a pipe a status is a line
like others. Showing something never ends a run: when the reader of the pipe or the terminal is
gone, or the disk behind it is full, nothing is shown any more.
"""

from __future__ import annotations

import os
from typing import TextIO

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

_ERASE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


class Terminal:
    """Terminal or pipe, with permanent lines and a status line that is overwritten.

    Args:
        file: standard output, or another stream in tests.
        terminal: whether `file` is a terminal; None: detected.
        width: number of columns of the terminal; None: detected.

    Attributes:
        live: True on a terminal, where the status line is overwritten; False in a pipe, where each
            status is a new line.
        columns: the largest width of a status; one less than the terminal's, because a full line
            would wrap.
        ascii_only: whether the stream's encoding lacks line-drawing characters.
    """

    def __init__(
        self, file: TextIO, *, terminal: bool | None = None, width: int | None = None
    ) -> None:
        self._file = file
        self._console = _Console(file=file, force_terminal=terminal, width=width)
        self._drawn = False  # the terminal's current line shows a status
        # Not rich's is_terminal: FORCE_COLOR in a pipe asks for colours, not for drawing over.
        is_terminal = file.isatty() if terminal is None else terminal
        self.live = is_terminal and not self._console.is_dumb_terminal
        self.columns = self._console.width - 1
        self.ascii_only = self._console.options.ascii_only

    def line(self, text: str, style: str = "") -> None:
        """Show a line that stays, in the status' place."""
        self._write(Text(text, style), end="\n")
        self._drawn = False

    def status(self, text: Text) -> None:
        """Show a status in place of the one before; in a pipe, a line."""
        if self.live:
            text.truncate(self.columns, overflow="crop")
        self._write(text, end="" if self.live else "\n")
        self._drawn = self.live

    def close(self) -> None:
        """Leave the status where it is and end its line."""
        if self._drawn:
            self._drawn = False
            self._write(Text(), end="\n")

    def _write(self, text: Text, end: str) -> None:
        try:
            with self._console:  # all of it in one write: nothing flickers
                if self._drawn:
                    self._console.control(_ERASE)
                self._console.print(text, end=end, soft_wrap=not self.live or not end)
        except OSError:
            self._console.quiet = True
            # What is still in the file's buffer would be an error once more at the process's exit.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Pass the error on: rich itself would exit."""
        raise
