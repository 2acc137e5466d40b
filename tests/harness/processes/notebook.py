"""A notebook whose cells run in IPython's shell, as in a kernel.

    python -m tests.harness.processes.notebook CELLS

CELLS is a JSON file. After each cell a line says how it ended: "cell 0: done", or the error's name.
A cell begins with Python's own handler of SIGINT, which is restored after it, as in ipykernel.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.harness.processes.command import Result, Running
from tests.harness.processes.python_program import ROOT


class Notebook(Running):
    """A notebook that runs."""

    def __init__(self, *cells: str, folder: Path, real: bool = False) -> None:
        file = folder / "cells.json"
        file.write_text(json.dumps(cells))
        command = [sys.executable, "-m", "tests.harness.processes.notebook", str(file)]
        variables = {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / "ipython")}
        super().__init__(command, folder=folder, variables=variables, real=real)


def run(*cells: str, folder: Path) -> Result:
    """Run a notebook's cells, and end its kernel."""
    return Notebook(*cells, folder=folder).wait()


def main(cells: Sequence[str]) -> None:
    from IPython.core.history import HistoryManager
    from IPython.core.interactiveshell import InteractiveShell

    HistoryManager.enabled = False
    InteractiveShell.colors.default_value = "nocolor"  # type: ignore[attr-defined]
    shell = InteractiveShell.instance()
    for number, cell in enumerate(cells):
        idle = signal.signal(signal.SIGINT, signal.default_int_handler)
        ended = shell.run_cell(cell, store_history=False)
        signal.signal(signal.SIGINT, idle)
        error = ended.error_before_exec or ended.error_in_exec
        print(f"cell {number}: {type(error).__name__ if error else 'done'}", flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
