"""Run the demo in a terminal of its own and draw what it shows, docs/demo*.svg.

    python docs/make_demo_picture.py

demo.svg is the terminal when the demo has ended, demo-progress.svg its last lines in the middle of
an epoch. The terminal understands what the demo needs: colours, "back to the start of the line",
"erase the line", and wrapping.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

REPOSITORY = Path(__file__).parents[1]
COLUMNS, ROWS = 116, 40
RECENT = 5  # lines of the picture of the progress
IN_THE_MIDDLE = re.compile(r"epoch .*━─+  1\d/.* left ")

_ERASE_LINE = "\x1b[2K"
_OTHER_CONTROLS = re.compile(r"\x1b\[\?25[lh]|\x1b\[1?A(?=\x1b\[2K)")  # the cursor; nothing to draw
# Without the fonts, which a viewer would fetch from elsewhere.
_SVG = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def main() -> None:
    """Run the demo, show it, and write the pictures."""
    lines: list[str] = []
    progress: list[str] = []
    for text, ended in shown(demo()):
        if ended:
            lines.append(text)
        elif not progress and len(lines) > 12 and IN_THE_MIDDLE.search(Text.from_ansi(text).plain):
            progress = [*lines, text][-RECENT:]
    draw(lines, "demo.svg", "make demo")
    draw(progress, "demo-progress.svg", "paceline train")


def demo() -> Iterator[str]:
    """Yield what the demo writes to its terminal, piece by piece."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(REPOSITORY)
        os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
        os.execv(sys.executable, [sys.executable, "examples/demo.py"])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    while data := _read(terminal):
        sys.stdout.write(data)
        yield data
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(os.waitstatus_to_exitcode(status))


def shown(pieces: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Yield each state of the terminal's last line, and whether it has ended."""
    line = ""
    for piece in pieces:
        line += _OTHER_CONTROLS.sub("", piece.replace("\r\n", "\n"))
        *ended, line = line.split("\n")
        yield from ((_visible(text), True) for text in ended)
        line = _visible(line)
        yield line, False


def draw(lines: list[str], name: str, title: str) -> None:
    """Draw lines, wrapped as a terminal does."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    for line in lines:
        text = Text.from_ansi(line)
        console.print(*text.divide(range(COLUMNS, len(text), COLUMNS)), sep="\n")
    svg = console.export_svg(title=title, code_format=_SVG, unique_id=Path(name).stem)
    (REPOSITORY / "docs" / name).write_text(svg)


def _visible(line: str) -> str:
    """Leave out what was drawn over."""
    return line.rpartition(_ERASE_LINE)[2].rpartition("\r")[2]


def _read(terminal: int) -> str:
    try:
        return os.read(terminal, 65536).decode(errors="replace")
    except OSError:  # the demo has ended
        return ""


if __name__ == "__main__":
    main()
