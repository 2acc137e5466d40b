"""`paceline compare RUN RUN`: in what runs differ: flags, results, time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.cli.active_run.find_run import find_run
from paceline.cli.active_run.summaries import RESULTS, results_of, summary_of
from paceline.cli.flags import parse
from paceline.cli.tables import table_console, table_of
from paceline.config.runs import CompareConfig
from paceline.errors import ConfigError, Message
from paceline.observe.run_summary import RunSummary

_DESCRIPTION = """\
Compare runs: the flags in which they differ, their results, and their time.

Examples:
  paceline compare first second
  paceline compare runs/first runs/second runs/third --json"""


def main(argv: Sequence[str]) -> int:
    """Run the command after `paceline compare`; return its exit status.

    Raises:
        ConfigError: there is no such run, or the runs have nothing in common to compare.
        PacelineError: a file can't be read.
        SystemExit: help was requested (0), or the arguments are wrong (2).
    """
    config = parse(CompareConfig, argv, prog="paceline compare", description=_DESCRIPTION)
    summaries = [summary_of(find_run(run, Path(config.output_dir))) for run in config.runs]
    _require_comparable(summaries)
    differences = dict(_differences(summaries))
    if config.json:
        runs = [one.as_json() for one in summaries]
        print(json.dumps({"runs": runs, "differences": differences}))
        return 0
    table = table_of("", *(one.run for one in summaries))
    for name, values in differences.items():
        table.add_row(f"--{name}", *map(_text, values))
    table.add_section()
    columns = zip(*map(results_of, summaries), strict=True)
    for name, results in zip(RESULTS, columns, strict=True):
        if any(results):
            table.add_row(name, *results)
    table_console().print(table)
    return 0


def _require_comparable(summaries: Sequence[RunSummary]) -> None:
    for one in summaries:
        if not one.steps and not one.epochs:
            raise ConfigError(
                Message(
                    "{}: no step of this run is recorded: there is nothing to compare.", one.run
                )
            )
    script = next((one.run for one in summaries if not one.is_of_command), None)
    other = next((one.run for one in summaries if one.is_of_command), None)
    if script is not None and other is not None:
        raise ConfigError(
            Message(
                "{} is the run of a script, and {} one of paceline train: they have no flags and "
                "no log in common. Compare runs of one kind.",
                script,
                other,
            )
        )


def _differences(summaries: Sequence[RunSummary]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the flags that aren't equal in all runs; None: a run doesn't know the flag."""
    names = dict.fromkeys(name for one in summaries for name in one.flags)
    for name in names:
        values = [one.flags.get(name) for one in summaries]
        if any(value != values[0] for value in values):
            yield name, values


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
