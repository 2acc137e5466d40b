"""Warnings of the records that a rank skips: the first few by name, then their number an epoch.

A run that skips more records than it trains has bad data, a failing disk or a wrong --num_labels,
and ends with an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.data.batch_slice import BatchSlice
from paceline.errors import DataError, many
from paceline.recorder import Recorder

_NAMED = 5  # records that are reported each by a line of its own
_ENOUGH = 64  # records after which their kind can be judged


class SkippedRecords:
    """Counter and log of the bad records that one rank skips.

    Args:
        recorder: receives notes on skipped records.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._named: set[int] = set()
        self._epoch = -1
        self._in_epoch: dict[int, DataError] = {}  # by number: a batch may be taken twice
        self._read = self._bad = 0
        self._last: DataError | None = None

    def take(self, rank: int, place: BatchSlice, bad: Mapping[int, DataError]) -> None:
        """Report what is skipped of a batch slice, and the number with an epoch's last slice.

        Raises:
            DataError: most of the records so far can't be used.
        """
        self._read += place.count
        self._bad += len(bad)
        for index, error in bad.items():
            if index not in self._named and len(self._named) <= _NAMED:
                self._named.add(index)
                text = f"a bad record: {error}"
                if len(self._named) > _NAMED:
                    text = "more bad records; they are counted and no longer named."
                self._note(f"rank {rank} skips {text}")
            self._last = error
        # A disk that fails, or a wrong --num_labels, makes
        # nearly all records bad, and few are no sign of it.
        if self._last and self._read >= _ENOUGH and 2 * self._bad > self._read:
            raise DataError(
                f"{self._bad} of the {self._read} records that rank {rank} has read so far can't "
                f"be used, which is too many to skip; the last of them: {self._last}"
            )
        if place.epoch != self._epoch:
            self._epoch = place.epoch
            self._in_epoch = {}
        self._in_epoch |= bad
        if self._in_epoch and place.step == place.steps - 1:
            first = next(iter(self._in_epoch.values()))
            self._note(
                f"rank {rank} skipped {many(len(self._in_epoch), 'bad record')} of epoch "
                f"{place.epoch}, the first of them: {first}"
            )

    def _note(self, text: str) -> None:
        self._recorder.event("note", text=text)
