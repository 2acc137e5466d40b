"""`paceline plot RUN …`: curves of runs, as a picture or as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from paceline.cli.active_run.find_run import find_run
from paceline.cli.active_run.summaries import RESULTS, results_of, summary_of
from paceline.cli.flags import parse
from paceline.cli.output_file import write_output
from paceline.config.runs import PlotConfig
from paceline.errors import ConfigError, Message, many
from paceline.observe.plots.page import page_of
from paceline.observe.plots.panels import png_of, require_matplotlib
from paceline.observe.plots.run_curves import RunCurves

_DESCRIPTION = """\
Plot the curves of runs on the same axes.

They are loss and accuracy by epoch and by time, speed, and waits by rank.

A dotted line marks where a worker was lost.

Examples:
  paceline plot first
  paceline plot runs/first runs/second --output both.html"""


def main(argv: Sequence[str]) -> int:
    """Run the command after `paceline plot`; return its exit status.

    Raises:
        ConfigError: there is no such run, it has no epoch, or the file can't be written.
        PacelineError: a file can't be read.
        SystemExit: help was requested (0), or the arguments are wrong (2).
    """
    config = parse(PlotConfig, argv, prog="paceline plot", description=_DESCRIPTION)
    folders = [find_run(run, Path(config.output_dir)) for run in config.runs]
    curves = [RunCurves.of_folder(folder, summary_of(folder)) for folder in folders]
    for folder, one in zip(folders, curves, strict=True):
        if not one.epochs:
            raise ConfigError(
                Message(
                    "{}: no epoch of this run is complete, so there is nothing to plot.", folder
                )
            )
    if config.json:
        print(json.dumps([asdict(one) for one in curves]))
        return 0
    require_matplotlib()
    output = Path(config.output)
    names = _names(folders)
    content: str | bytes
    if output.suffix.lower() == ".png":
        content = png_of(curves, names)
    else:
        content = page_of(curves, names, RESULTS, [results_of(one.summary) for one in curves])
    write_output("output", config.output, content)
    print(f"{output}: {many(len(curves), 'run')}.")
    return 0


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the runs' names, with those of the folders around them where two are equal."""
    names = [folder.name for folder in folders]
    if len(set(names)) == len(set(folders)):
        return names
    return [f"{folder.parent.name}/{folder.name}" for folder in folders]
