"""Tables of `paceline db info`: the summary of a database and its label histogram."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleRenderable
from rich.table import Table
from rich.text import Text

from paceline.data.db.inspect import Report
from paceline.errors import many

_BAR = 24  # characters of the longest bar
_ROWS = 40  # labels shown: all of CIFAR's, not all of ImageNet's


def print_report(report: Report, console: Console) -> None:
    """Print what a database holds."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _facts(report):
        table.add_row(name, Text(value, overflow="fold"))
    console.print(table)
    if report.labels:
        console.print(_histogram(report))
    if report.first_damaged is not None:
        damaged = f"{report.damaged:,} of {report.records:,} records are damaged"
        console.print(Text(f"{damaged}; the first one:"))
        console.print(Text(f"  {report.first_damaged}"), soft_wrap=True)


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "database", f"{report.path} ({report.db_type})"
    yield "records", f"{report.records:,}"
    yield "format", report.record_format
    yield "images", ", ".join(f"{n:,} {kind}" for kind, n in sorted(report.encodings.items()))
    if len(report.sizes) == 1:
        ((width, height),) = report.sizes
        yield "size", f"{width} × {height}, all"
    elif report.sizes:
        for axis, name in enumerate(("width", "height")):
            smallest, median, largest = report.sides(axis)
            yield name, f"{smallest} to {largest}, median {median}"
        (width, height), count = max(report.sizes.items(), key=lambda item: item[1])
        yield "most common", f"{width} × {height}, {count:,} of {sum(report.sizes.values()):,}"
    if report.labels:
        most = max(report.labels.values())
        least = min(report.labels.values())
        each = many(most, "record") if least == most else f"{least:,} to {most:,} records"
        yield "labels", f"{many(len(report.labels), 'distinct label')}, {each} per label"


def _histogram(report: Report) -> ConsoleRenderable:
    table = Table(pad_edge=False)
    table.add_column("label", justify="right")
    table.add_column("name", overflow="fold")
    table.add_column("records", justify="right")
    table.add_column("")
    most = max(report.labels.values())
    names = dict(enumerate(report.label_names or ()))
    labels = sorted(report.labels.keys() | names.keys())
    for label in labels[:_ROWS]:
        count = report.labels.get(label, 0)
        bar = "█" * round(_BAR * count / most)
        table.add_row(str(label), Text(names.get(label, "")), f"{count:,}", bar)
    if len(labels) > _ROWS:
        table.add_row("…", f"and {len(labels) - _ROWS:,} more", "", "")
    return table
