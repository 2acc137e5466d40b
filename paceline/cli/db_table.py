"""Tables of `paceline db info`: the summary of a database and its label histogram."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleRenderable
from rich.table import Table
from rich.text import Text

from paceline.data.db.inspect import Report

_BAR = 24  # characters of the longest bar
_ROWS = 40  # labels shown: all of CIFAR's, not all of ImageNet's


def print_report(report: Report, console: Console) -> None:
    """Print what a database holds."""
    console.print(_summary(report))
    if report.labels:
        console.print(_histogram(report))
    if report.first_damaged is not None:
        damaged = f"{report.damaged:,} of {report.records:,} records are damaged"
        console.print(Text(f"{damaged}; the first one:"))
        console.print(Text(f"  {report.first_damaged}"), soft_wrap=True)


def _summary(report: Report) -> ConsoleRenderable:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _facts(report):
        table.add_row(name, Text(value, overflow="fold"))
    return table


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "database", f"{report.path} ({report.db_type})"
    yield "records", f"{report.records:,}"
    yield "format", report.record_format
    yield "images", ", ".join(f"{n:,} {kind}" for kind, n in sorted(report.encodings.items()))
    if len(report.sizes) == 1:
        ((width, height),) = report.sizes
        yield "size", f"{width} × {height}, all"
    elif report.sizes:
        for name, sides in (("width", report.sides(0)), ("height", report.sides(1))):
            yield name, f"{sides.smallest} to {sides.largest}, median {sides.middle}"
        (width, height), count = max(report.sizes.items(), key=lambda item: item[1])
        yield "most common", f"{width} × {height}, {count:,} of {sum(report.sizes.values()):,}"
    if report.labels:
        most, least = max(report.labels.values()), min(report.labels.values())
        each = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        yield "labels", f"{len(report.labels):,} distinct labels, {each} records per label"


def _histogram(report: Report) -> ConsoleRenderable:
    table = Table(pad_edge=False)
    table.add_column("label", justify="right")
    table.add_column("name", overflow="fold")
    table.add_column("records", justify="right")
    table.add_column("")
    most = max(report.labels.values())
    known = range(len(report.label_names or ()))
    labels = sorted(report.labels.keys() | set(known))
    for label in labels[:_ROWS]:
        count = report.labels.get(label, 0)
        bar = "█" * round(_BAR * count / most)
        table.add_row(str(label), Text(_name(report, label)), f"{count:,}", bar)
    if len(labels) > _ROWS:
        table.add_row("…", f"and {len(labels) - _ROWS:,} more", "", "")
    return table


def _name(report: Report, label: int) -> str:
    names = report.label_names or ()
    return names[label] if label < len(names) else ""
