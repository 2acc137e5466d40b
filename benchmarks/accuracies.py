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
    """Print a line a way: its accuracies, their mean, and the points from the first way's.

    Args:
        title: of the first column.
        ends: the last accuracy for each seed, by way.
        seeds: numbers.
        width: of the first column.
        markdown: whether the table is markdown.
    """
    base = next(iter(ends.values()))
    lines = [[title, *(f"seed {seed}" for seed in seeds), "mean", "points above the first line"]]
    for way, accuracies in ends.items():
        cells = [f"{accuracy:.2%}" for accuracy in (*accuracies, mean(accuracies))]
        points = [100 * (own - first) for own, first in zip(accuracies, base, strict=True)]
        by_seed = ", ".join(f"{point:+.2f}" for point in points)
        lines.append([way, *cells, f"{mean(points):+.2f} ({by_seed})"])
    widths = [width, *[10] * (len(seeds) + 1), max(len(line[-1]) for line in lines) + 2]
    print_table(lines, widths, markdown=markdown)
