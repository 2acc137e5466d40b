"""Progress of a long job: a bar on a terminal, elsewhere a line every 10 seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from paceline.data.ordered_map import Meter

_REFRESH = 0.1  # seconds between two drawings of the bar
_LINE = 10.0  # seconds between two lines


@contextmanager
def meter(
    title: str, unit: str, console: Console, clock: Callable[[], float] = time.monotonic
) -> Iterator[Meter]:
    """Provide a function of (done, total) that shows the progress, the rate and the time left.

    Args:
        title: the activity, such as "Reading".
        unit: the plural of what is counted.
        console: where to show it.
        clock: seconds from any start.
    """
    if console.is_terminal:
        with _bar(title, unit, console, clock) as show:
            yield show
    else:
        yield _lines(title, unit, console, clock)


@contextmanager
def _bar(title: str, unit: str, console: Console, clock: Callable[[], float]) -> Iterator[Meter]:
    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TaskProgressColumn(), rate)
    progress = Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        redirect_stdout=sys.stdout.isatty(),  # results in a file or a pipe aren't the console's
    )
    with progress:
        task = progress.add_task(title, rate="")
        start = clock()
        shown = 0.0

        def show(done: int, total: int) -> None:
            nonlocal shown
            now = clock()
            if done == total or now - shown >= _REFRESH:
                shown = now
                speed = f"{_rate(done, now - start)} {unit}/s"
                progress.update(task, completed=done, total=total, rate=speed)

        yield show


def _lines(title: str, unit: str, console: Console, clock: Callable[[], float]) -> Meter:
    start = clock()
    printed: float | None = None

    def show(done: int, total: int) -> None:
        nonlocal printed
        now = clock()
        if printed is not None and now - printed < _LINE and done < total:
            return
        line = f"{title}: {done:,} of {total:,} {unit}"
        if printed is not None:  # the first record gives no rate
            left = timedelta(seconds=round((now - start) / done * (total - done)))
            line += f", {_rate(done, now - start)}/s, {left} left"
        printed = now
        console.print(line, highlight=False, soft_wrap=True)

    return show


def _rate(done: int, seconds: float) -> str:
    return f"{done / max(seconds, 1e-3):,.0f}"
