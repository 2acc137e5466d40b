"""Caffe2's CSV log: one file a run, one row an epoch, read by its users' plotting scripts.

The format is that of Caffe2's `experiment_util.ModelTrainerLog`: a comment with all parameters, a
header, and rows that are written out at once, so that a killed run keeps all its finished epochs.

    resnet50_gpu2_b64_L1000_lr0.10_v2_20180102_030405.log
    # Namespace(batch_size=32, …)
    time_spent,cumulative_time_spent,input_count,…
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.atomic_write import explained_writes, write_atomically
from paceline.cluster.membership.protocol import Membership
from paceline.generation.run import Leadership
from paceline.observe.line_file import LineFile
from paceline.recorder import NullRecorder

NO_TEST = -1  # test_accuracy of a run without test data


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Values of the cumulative columns after an epoch, which a resumed run restores."""

    seconds: float = 0.0
    samples: int = 0
    batches: int = 0


# Each column's value: a field of the `epoch` event, or one that `CsvLog.event` adds. A new column
# is a line here and, where it needs one, a field of the event that `trainer.py` sends.
COLUMNS = {
    "time_spent": "seconds_of_row",
    "cumulative_time_spent": "total_seconds",
    "input_count": "samples",
    "cumulative_input_count": "total_samples",
    "cumulative_batch_count": "total_batches",
    "inputs_per_sec": "samples_per_second",
    "accuracy": "accuracy",
    "epoch": "epoch",
    "learning_rate": "learning_rate",
    "loss": "loss",
    "test_accuracy": "test_accuracy",
}
_NAMES = tuple(COLUMNS)
_COUNTS = ("cumulative_input_count", "cumulative_batch_count", "epoch")


class CsvLog(NullRecorder):
    """Recorder that makes a CSV row at each `epoch` event, and writes it as the leader.

    Every member makes the rows, so that the next leader knows the totals. A leader that finds the
    log of an earlier one continues that file, with the rows that it lacks; otherwise it begins one.

    The event's fields are epoch, samples (in this epoch, over all machines), batches (in this
    epoch), loss, accuracy, learning_rate and test_accuracy (None without test data). The column
    `time_spent` is the time since the previous row or, in the first row, since the log was opened.
    As in Caffe2, it includes evaluation.

    Args:
        folder: the run's folder, which exists.
        name: the part of the file name before the timestamp, as `log_name` returns it.
        parameters: all parameters of the run.
        now: the timestamp in the file's name.
        epoch: the epoch in which the run resumes. The recorder continues the newest log of an
            earlier start, but first removes its rows of this epoch and of later ones.
        totals: the totals of the epochs before it, where the folder's log lacks them.
        leadership: says whether this process is the leader, which alone writes.
        clock: returns seconds since an arbitrary origin.
        membership: says, for each row, whether this process is in the world; None: it is.

    Attributes:
        path: the file; None until this process has been the leader.
        recorded: the last epoch whose end a leader recorded before the run went back, in this start
            of it; -1: none. The epochs up to it may end once more.

    Raises:
        PacelineError: the file can't be written; also raised by `event` and `close`.
        PeerLost: raised by `event`, where this process may be outside the world.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        parameters: Mapping[str, object],
        now: datetime,
        epoch: int = 0,
        totals: Totals | None = None,
        leadership: Leadership,
        clock: Callable[[], float] = time.monotonic,
        membership: Membership | None = None,
    ) -> None:
        settings = ", ".join(f"{key}={value!r}" for key, value in parameters.items())
        self._head = f"# Namespace({settings})\n{','.join(_NAMES)}\n"
        self._folder = folder
        self._name = f"{name}_{now:%Y%m%d_%H%M%S}.log"
        self._leadership = leadership
        self._clock = clock
        self._membership = membership
        self._epoch = epoch - 1  # of the last row
        # One an epoch, not the last alone, because a run can go back over an epoch's end.
        self._totals = {self._epoch: totals or Totals()}  # after each epoch since this start
        self._rows: dict[int, str] = {}  # made here, by their epochs
        self._file: LineFile | None = None
        self.path: Path | None = None
        self.recorded = -1
        self._took_over = False  # in this generation, from a lost leader
        if leadership.leads:
            self._open()
        self._last_row = clock()

    def _hand_over(self) -> None:
        """Open the file if this process has become the leader; close it if it is no longer."""
        if not self._leadership.leads:
            self.close()
        elif self._file is None:
            found = self._open()
            self._took_over = True
            # The lost leader's row may be the first news of an epoch's end, but not of two.
            self.recorded = self._epoch if found is None else min(found, self._epoch + 1)

    def event(self, name: str, **fields: Any) -> None:
        """Make a row if an epoch ended; remove the rows to which a run has gone back."""
        if name in ("restore", "epoch"):
            self._hand_over()
        if name == "restore":
            if fields["epoch"] <= self._epoch:
                self._go_back(fields["epoch"])
            self._took_over = False
        elif name == "epoch":
            self._add_row(fields)

    def close(self) -> None:
        """Close the file."""
        file = self._file
        self._file = None
        if file is not None:
            file.close()

    def _add_row(self, fields: Mapping[str, Any]) -> None:
        now = self._clock()
        samples = fields["samples"]
        accuracy = fields["test_accuracy"]
        seconds = now - self._last_row
        self._last_row = now
        before = self._totals.get(self._epoch, Totals())
        totals = Totals(
            seconds=before.seconds + seconds,
            samples=before.samples + samples,
            batches=before.batches + fields["batches"],
        )
        values = {
            **fields,
            "seconds_of_row": seconds,
            "total_seconds": totals.seconds,
            "total_samples": totals.samples,
            "total_batches": totals.batches,
            "samples_per_second": samples / seconds if seconds > 0 else 0.0,
            "test_accuracy": NO_TEST if accuracy is None else accuracy,
        }
        row = ",".join(_text(values[key]) for key in COLUMNS.values())
        self._epoch = fields["epoch"]
        self._rows[self._epoch] = row
        self._totals[self._epoch] = totals
        if self._file is not None:
            self._file.write(row, self._membership)

    def _go_back(self, epoch: int) -> None:
        if self._file is not None and not self._took_over:
            self.recorded = max(self.recorded, self._epoch)
        self._epoch = epoch - 1
        self._rows = {each: row for each, row in self._rows.items() if each < epoch}
        self._totals = {each: totals for each, totals in self._totals.items() if each < epoch}
        if self._file is not None:
            self.close()
            self._open()

    def _open(self) -> int | None:
        """Continue the folder's newest log, without rows of later epochs, or begin one.

        Returns:
            the epoch of the last row that was found, -1 if there was none; None without a log.
        """
        earlier = _logs(self._folder)
        self.path = earlier[-1] if earlier else self._folder / self._name
        head, rows = _read(self.path)
        found = max(rows, default=-1) if earlier else None
        rows = {epoch: row for epoch, row in rows.items() if epoch <= self._epoch}
        last = max(rows, default=-1)
        if earlier:  # the leader that wrote it may have been lost before a row
            made = {epoch: row.split(",") for epoch, row in self._rows.items() if epoch > last}
            rows |= dict(sorted(made.items()))
        with explained_writes(self.path):
            text = "".join(",".join(row) + "\n" for row in rows.values())
            write_atomically(self.path, (head or self._head) + text)
        self._file = LineFile(self.path)
        known = [_totals_of(row) for row in rows.values()][-1:]
        known.append(self._totals.get(self._epoch, Totals()))
        self._totals[self._epoch] = max(known, key=lambda totals: totals.batches)
        return found


def read_totals(folder: Path) -> dict[int, Totals]:
    """Return the totals after each epoch, by the newest log in a run's folder."""
    logs = _logs(folder)
    return {epoch: _totals_of(row) for epoch, row in _read(logs[-1])[1].items()} if logs else {}


def _logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*_v2_*.log"), key=lambda path: path.name[-19:])


def _read(path: Path) -> tuple[str, dict[int, list[str]]]:
    """Return a log's comment and header, "" without a file, and its complete rows by epoch."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = text.splitlines()
    rows = [line.split(",") for line in lines[2:]]
    column = _NAMES.index("epoch")
    head = "".join(f"{line}\n" for line in lines[:2])
    return head, {int(row[column]): row for row in rows if _whole(row)}


def _totals_of(row: list[str]) -> Totals:
    values = dict(zip(_NAMES, row, strict=True))
    return Totals(
        seconds=float(values["cumulative_time_spent"]),
        samples=int(values["cumulative_input_count"]),
        batches=int(values["cumulative_batch_count"]),
    )


def _whole(row: list[str]) -> bool:
    """Return whether a row is complete and its counts are numbers."""
    values = dict(zip(_NAMES, row, strict=False))
    try:
        float(values["cumulative_time_spent"])
    except (KeyError, ValueError):
        return False
    return len(row) == len(_NAMES) and all(values[name].isdecimal() for name in _COUNTS)


def log_name(
    model: str, devices: int, batch_size: int, num_labels: int, learning_rate: float
) -> str:
    """Name a log after its run as Caffe2 did, without the time and the ending.

    Args:
        model: the model's short name.
        devices: devices of this machine.
        batch_size: images a step on this machine.
        num_labels: classes.
        learning_rate: at the start.
    """
    return f"{model}_gpu{devices}_b{batch_size}_L{num_labels}_lr{learning_rate:.2f}_v2"


def _text(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.8g}"
