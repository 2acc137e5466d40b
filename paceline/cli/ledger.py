"""`paceline ledger RUN`: verifies from the event files that a run trained each sample exactly once.

The status is 0 if the ledger is exact, 1 if it isn't, 2 if there is no such run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from paceline.cli.active_run.find_run import known_runs
from paceline.cli.flags import parse
from paceline.cli.ledger_table import print_proof
from paceline.config.ledger import LedgerConfig
from paceline.errors import ConfigError, Message
from paceline.observe.event_file import find_event_files, read_events
from paceline.observe.ledger import prove
from paceline.state.run_folder import CONFIG_NAME

_DESCRIPTION = """\
Verify from the event files that a run trained each sample exactly once.

The exit status is 0 only if no sample is lost or duplicated.

The run may be active or interrupted: then its last epoch may be incomplete.

Examples:
  paceline ledger first
  paceline ledger runs/first --json
  paceline ledger machine0/runs/first machine1/runs/first"""


def main(argv: Sequence[str]) -> int:
    """Run the command after `paceline ledger`; return its exit status.

    Raises:
        ConfigError: there is no such run.
        DataError: an event file is damaged, unreadable or another run's, or the run never began.
        SystemExit: help was requested (0), or the arguments are wrong (2).
    """
    config = parse(LedgerConfig, argv, prog="paceline ledger", description=_DESCRIPTION)
    folders = [_folder(run, Path(config.output_dir)) for run in config.runs]
    files = find_event_files(*dict.fromkeys(folders))
    proof = prove((member, read_events(path)) for member, path in files)
    if config.json:
        print(json.dumps({"exact": proof.exact, **asdict(proof)}))
    else:
        print_proof(proof, Console())
    return 0 if proof.exact else 1


def _folder(run: str, output_dir: Path) -> Path:
    """Return a run's folder, given its path or id."""
    for folder in (Path(run), output_dir / run):
        if find_event_files(folder) or (folder / CONFIG_NAME).is_file():
            return folder.resolve()
    known = sorted({path.parent.name for path in output_dir.glob("*/events.*.jsonl")})
    raise ConfigError(
        Message(
            "{} is neither a run folder (with files events.<member>.jsonl) nor the id of a run in "
            "{--output_dir} {}{}; check the path.",
            run,
            output_dir,
            known_runs(known),
        )
    )
