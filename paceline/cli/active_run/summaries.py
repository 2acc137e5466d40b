"""Summaries of runs, and how tables show their values."""

from __future__ import annotations

from pathlib import Path

from paceline.cluster.supervision.requests.member_record import RunProcesses
from paceline.observe.progress_rate import duration
from paceline.observe.run_summary import RunSummary
from paceline.state.run_folder import is_finished, read_configuration

RESULTS = ("state", "epochs", "loss", "accuracy", "time", "images/s", "cost")
"""What a table shows of a run's progress and result."""


def summary_of(folder: Path) -> RunSummary:
    """Read the summary of a run.

    Raises:
        PacelineError: a file can't be read.
    """
    return RunSummary.of_folder(
        folder,
        read_configuration(folder),
        finished=is_finished(folder),
        active=bool(RunProcesses.of(folder).here),
    )


def results_of(one: RunSummary) -> list[str]:
    """Return what a table shows of a run, by `RESULTS`; "" for what isn't known."""
    of_all = one.flags.get("num_epochs")
    epochs = "" if one.epochs is None else f"{one.epochs:,}"
    return [
        one.state,
        f"{epochs or 0}/{of_all:,}" if isinstance(of_all, int) else epochs,
        "" if one.loss is None else f"{one.loss:.4f}",
        "" if one.accuracy is None else f"{one.accuracy:.2%}",
        "" if one.seconds is None else duration(one.seconds),
        "" if one.images_per_second is None else f"{one.images_per_second:,.0f}",
        "" if one.cost is None else ", ".join(one.cost.texts),
    ]
