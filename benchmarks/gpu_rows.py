"""Rows of `gpu.py`'s table: what was measured, its target, and its ratio to a peer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from time import monotonic

import torch
from rounds import Interval

WIDTH = 100  # of an error in the table; the JSON file has more
TITLES = ("", "measured", "result", "target", "ratio to its peer, 95 %")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all sections are told.

    Attributes:
        device: where the model computes.
        folder: for files, removed at the end.
        deadline: of the section, by the monotonic clock.
    """

    device: torch.device
    folder: Path
    deadline: float = inf

    @property
    def small(self) -> bool:
        """Whether sizes are those of a CPU, which show that everything runs and no speed."""
        return self.device.type == "cpu"

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - monotonic()


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table.

    Attributes:
        name: what was measured.
        measured: the value, in words.
        value: the same as a number.
        correct: whether the result is right; None where only speed is measured.
        target: what the project asks for, in words.
        met: whether the target is met; None where there is none, or it can't be measured here.
        peer: what the ratio is to.
        ratio: this row over its peer.
        error: what happened, where the row failed.
    """

    name: str
    measured: str = ""
    value: float | None = None
    correct: bool | None = None
    target: str = ""
    met: bool | None = None
    peer: str = ""
    ratio: Interval | None = None
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether the row makes the exit status 1; a target of speed that is missed doesn't."""
        return bool(self.error) or self.correct is False

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of the table."""
        ratio = "" if self.ratio is None else f"{self.ratio:.3f} of {self.peer}"
        measured = self.error[:WIDTH] or self.measured
        return self.name, measured, self._result, self.target, ratio

    @property
    def fields(self) -> dict[str, object]:
        """The fields of the JSON file."""
        return asdict(self)

    @property
    def _result(self) -> str:
        if self.failed:
            return "FAILED"
        if self.met is not None:
            return "met" if self.met else "missed"
        return "ok" if self.correct else ""


def not_measured(name: str, why: str) -> Row:
    """Return the row of what can't be measured here."""
    return Row(name=name, measured=f"not measured: {why}")


def failure(name: str, error: BaseException) -> Row:
    """Return the row of what failed; its cell has the error's last line."""
    text = str(error).strip() or type(error).__name__
    return Row(name=name, error=text.splitlines()[-1][:1000])


def print_rows(rows: Sequence[Row]) -> None:
    """Print the table, its columns as wide as they have to be."""
    lines = [TITLES, *(row.cells for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip(), flush=True)


@contextmanager
def failing_alone(rows: list[Row], name: str) -> Iterator[None]:
    """Turn an exception of the block into a row; what follows the block runs."""
    try:
        yield
    except Exception as error:
        rows.append(failure(name, error))
