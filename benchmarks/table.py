"""Tables: the names of their rows, and how they are printed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from math import isfinite


def method_of(row: str) -> str:
    """Return what stands before the size of a bucket: `ddp` for `ddp:25`."""
    return row.partition(":")[0]


def size_of(row: str) -> tuple[float, int]:
    """Return the size of a bucket in MiB, 0 where none stands there, and the connections to a peer.

    `notified:8` has one connection, `notified:8x4` four.
    """
    bucket_mb, _, connections = row.partition(":")[2].partition("x")
    return float(bucket_mb or 0), int(connections or 1)


def one_of(methods: Collection[str]) -> Callable[[str], str]:
    """Return what checks a row's name: METHOD, METHOD:MB, or METHOD:MBxCONNECTIONS."""

    def check(row: str) -> str:
        method, colon, size = row.partition(":")
        bucket_mb, times, connections = size.partition("x")
        if method not in methods:
            raise argparse.ArgumentTypeError(f"{method!r} is none of {', '.join(methods)}")
        if colon and not _is_positive(bucket_mb):
            raise argparse.ArgumentTypeError(f"{bucket_mb} MiB is no size of a bucket")
        if times and not (connections.isdecimal() and method.startswith("notified")):
            raise argparse.ArgumentTypeError(f"{row}: a number of connections is for notified only")
        return row

    return check


def print_table(lines: Sequence[Sequence[str]], widths: Sequence[int], *, markdown: bool) -> None:
    """Print lines of cells, titles first, aligned or as markdown."""
    for number, line in enumerate(lines):
        if markdown:
            print(f"| {' | '.join(line)} |" + ("\n|" + " --- |" * len(line)) * (number == 0))
        else:
            cells = [f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)]
            print("".join([f"{line[0]:{widths[0]}}", *cells[1:]]).rstrip())
    sys.stdout.flush()


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0 and isfinite(float(text))
    except ValueError:
        return False
