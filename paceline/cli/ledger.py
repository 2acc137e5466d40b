"""`paceline ledger RUN`: proves from a run's event files that each sample was trained once.

The status is 0 if what stands is exact, 1 if it isn't, 2 if there is no such run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.cli.flags import parse
from paceline.cli.ledger_table import print_proof
from paceline.config.ledger import LedgerConfig
from paceline.errors import ConfigError, DataError
from paceline.observe.event_file import read_events
from paceline.observe.ledger import Proof, prove
from paceline.state.run_folder import CONFIG_NAME

_NAME = re.compile(r"events\.rank(\d+)\.jsonl")

_DESCRIPTION = """\
Prove from the ranks' own event files that a run trained each sample once.
The run may go on meanwhile, or have been interrupted.

The exit status is 0 only if it is exact: each finished epoch complete, the
running one without a gap, nothing lost and nothing twice.

Examples:
  paceline ledger first
  paceline ledger runs/first --json
  paceline ledger machine0/runs/first machine1/runs/first"""


def main(argv: Sequence[str]) -> int:
    """Run the command after `paceline ledger`; return its exit status.

    Raises:
        ConfigError: there is no such run.
        DataError: an event file is damaged, can't be read, or is another run's, or the run never
            began.
        SystemExit: help was asked for (0), or the arguments are wrong (2).
    """
    config = parse(LedgerConfig, argv, prog="paceline ledger", description=_DESCRIPTION)
    folders = [_folder(run, Path(config.output_dir)) for run in config.runs]
    files = sorted(file for folder in dict.fromkeys(folders) for file in _event_files(folder))
    proof = prove((rank, _events(path)) for rank, path in files)
    if config.json:
        print(json.dumps(_plain(proof)))
    else:
        print_proof(proof, Console())
    return 0 if proof.exact else 1


def _folder(run: str, output_dir: Path) -> Path:
    """Find a run's folder by its path or its id."""
    for folder in (Path(run), output_dir / run):
        if _event_files(folder) or (folder / CONFIG_NAME).is_file():
            return folder.resolve()
    known = sorted(path.parent.name for path in output_dir.glob("*/events.rank0.jsonl"))
    there = f"; {output_dir} has {', '.join(known[-5:])}" if known else ""
    raise ConfigError(
        f"{run}: no run's folder, with files events.rank<r>.jsonl, nor the id of a run in "
        f"--output_dir {output_dir}{there}; check the path."
    )


def _event_files(folder: Path) -> list[tuple[int, Path]]:
    named = ((path, _NAME.fullmatch(path.name)) for path in folder.glob("events.rank*.jsonl"))
    return [(int(match.group(1)), path) for path, match in named if match]


def _events(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        yield from read_events(path)
    except OSError as error:
        raise DataError(
            f"{path} can't be read ({error.strerror}); run this as the one who trained."
        ) from error


def _plain(proof: Proof) -> dict[str, Any]:
    return {"exact": proof.exact, **asdict(proof)}
