"""Tables of commands: on a terminal as wide as it is; elsewhere, as wide as their content."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

_WIDE = 10_000  # columns, where nothing limits them


def table_console() -> Console:
    """Make a console on standard output that breaks no cell where it isn't a terminal."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal else Console(soft_wrap=True, width=_WIDE)


def table_of(*columns: str) -> Table:
    """Make a table with some columns."""
    return Table(*columns)
