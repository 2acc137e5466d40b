"""Accuracies of several runs: where a run's folder has them, and the table by seeds."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from table import print_table


def last_accuracy(run: Path) -> float:
    """Return the last test accuracy that is in a run's log."""
    (log,) = run.glob("*.log")
    lines = [line for line in log.read_text().splitlines() if not line.startswith("#")]
    return float(list(csv.DictReader(lines))[-1]["test_accuracy"])


def print_ends(
    title: str,
    ends: Mapping[str, Sequence[float]],
    seeds: Sequence[int],
    *,
    width: int,
    markdown: bool,
) -> None:
    """Print a line a way: its accuracies, their mean, and what that is from the first way's.

    Args:
        title: of the first column.
        ends: the last accuracy for each seed, by way.
        seeds: numbers.
        width: of the first column.
        markdown: whether the table is markdown.
    """
    names = list(ends)
    first = mean(ends[names[0]])
    lines = [[title, *(f"seed {seed}" for seed in seeds), "mean", f"points from {names[0]}"]]
    for way, accuracies in ends.items():
        cells = [f"{accuracy:.2%}" for accuracy in (*accuracies, mean(accuracies))]
        lines.append([way, *cells, f"{100 * (mean(accuracies) - first):+.2f}"])
    widths = [width, *[10] * (len(seeds) + 1), len(lines[0][-1]) + 2]
    print_table(lines, widths, markdown=markdown)
