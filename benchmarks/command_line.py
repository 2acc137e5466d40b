"""The command line of a benchmark: its options, and how its script runs and ends."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from children import adopt_orphans, kill_descendants
from links import LinkError


class Options(argparse.ArgumentParser):
    """Parser of a benchmark's options, whose help says each default.

    Args:
        doc: the script's docstring; its first line is the description.
        quick: what `--quick` does; without it there is no such option.
        markdown: whether there is `--markdown`, for tables.
        figures: whether there is `--json`, for a file of all figures.
    """

    def __init__(
        self, doc: str, *, quick: str = "", markdown: bool = False, figures: bool = False
    ) -> None:
        super().__init__(description=doc.splitlines()[0])
        if quick:
            self.add("--quick", action="store_true", help=quick)
        if markdown:
            self.add("--markdown", action="store_true", help="print tables as markdown")
        if figures:
            self.add("--json", type=Path, metavar="PATH", help="write all figures to this file")

    def add(self, *names: str, **settings: Any) -> None:
        """Add an option as argparse does; its help says the default, where it doesn't already."""
        words = settings.get("help", "")
        if settings.get("default") is not None and "default:" not in words:
            settings["help"] = f"{words}; default: %(default)s".removeprefix("; ")
        self.add_argument(*names, **settings)


def run_script(
    main: Callable[[], int | None], rank: Callable[[dict[str, Any]], object] | None = None
) -> None:
    """Run a benchmark's script, and end with its status; Ctrl-C is status 130, without a traceback.

    SIGTERM is status 143. After both, and after an error, no process is left that it has started.

    Args:
        main: what a user starts.
        rank: what a process does that `main` has started, with its work as a JSON object in place
            of options.
    """
    try:
        if rank is not None and sys.argv[1:] and sys.argv[1].startswith("{"):
            rank(json.loads(sys.argv[1]))
            return
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        adopt_orphans()
        try:
            status = main()
        except BaseException:  # a signal's, too
            kill_descendants()
            raise
        sys.exit(status)
    except LinkError as error:
        sys.exit(f"no such link here: {error}.")
    except KeyboardInterrupt:
        sys.exit(130)
