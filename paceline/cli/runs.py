"""`paceline runs`: a table of the runs in a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from paceline.cli.active_run.find_run import runs_in
from paceline.cli.active_run.summaries import RESULTS, results_of, summary_of
from paceline.cli.flags import parse
from paceline.cli.tables import table_console, table_of
from paceline.config.runs import RunsConfig
from paceline.errors import ConfigError, Message
from paceline.observe.run_summary import RunSummary

_DESCRIPTION = """\
Show the runs in a folder: what was trained, how far, with which result.

Examples:
  paceline runs
  paceline runs --output_dir results --json"""


def main(argv: Sequence[str]) -> int:
    """Run the command after `paceline runs`; return its exit status.

    Raises:
        ConfigError: there is no such folder, or no run in it.
        PacelineError: a file can't be read.
        SystemExit: help was requested (0), or the arguments are wrong (2).
    """
    config = parse(RunsConfig, argv, prog="paceline runs", description=_DESCRIPTION)
    folders = runs_in(Path(config.output_dir))
    if not folders:
        raise ConfigError(
            Message("{--output_dir} {}: there is no run in it; check the path.", config.output_dir)
        )
    summaries = [summary_of(folder) for folder in folders]
    if config.json:
        for one in summaries:
            print(json.dumps(one.as_json()))
    else:
        _print(summaries, table_console())
    return 0


def _print(summaries: Sequence[RunSummary], console: Console) -> None:
    table = table_of("run", "model", *RESULTS)
    for one in summaries:
        table.add_row(one.run, _model(one), *results_of(one))
    console.print(table)


def _model(one: RunSummary) -> str:
    if not one.is_of_command:
        return "a script's"
    model = one.flags.get("model")
    return str(model or f"resnet{one.flags.get('num_layers', 50)}")
