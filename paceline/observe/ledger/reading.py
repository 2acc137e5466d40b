"""Reads events into a history, line by line: what is kept grows with changes, not with steps.

Only an event's fields are checked here: that they are there, are whole numbers, and that all files
tell of one run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.errors import DataError
from paceline.observe.ledger.history import Extent, Generation, Stretch

Events = Iterable[Mapping[str, Any]]


class History:
    """History of a run, read from all of its event files in one pass.

    Args:
        files: pairs of a rank and its events; the events are in the order in which they were
            written. A rank may have several files, if it was on several machines.

    Attributes:
        extent: the run's expected size.
        generations: the records of each generation, by its number.
        ranks: the ranks that have an event file.

    Raises:
        DataError: an event lacks a field, or the files are those of different runs.
    """

    def __init__(self, files: Iterable[tuple[int, Events]]) -> None:
        self.generations: dict[int, Generation] = defaultdict(Generation)
        self.ranks: set[int] = set()
        self._started: set[tuple[int, int]] = set()  # (rank, generation)
        self._extent: Extent | None = None
        for rank, events in files:
            self._read(rank, events)
        if self._extent is None:
            raise DataError(
                "No rank has written the start of a run: the run hasn't begun, or it ended "
                "before it wrote its start event; start it again with the same command."
            )
        self.extent: Extent = self._extent

    def _read(self, rank: int, events: Events) -> None:
        self.ranks.add(rank)
        stretch = None
        for number, event in enumerate(events, start=1):
            try:
                if event["event"] == "step":
                    stretch = self._step(rank, event, stretch)
                elif "generation" in event:
                    self._other(rank, event)
            except (KeyError, TypeError) as error:
                what = f"{error} is missing" if isinstance(error, KeyError) else error
                raise DataError(
                    f"Event {number} of rank {rank}, {dict(event)}, can't be used ({what}): it was "
                    "damaged, or another version of Paceline wrote it."
                ) from error

    def _step(self, rank: int, event: Mapping[str, Any], stretch: Stretch | None) -> Stretch:
        """Lengthen the stretch by a step, or begin a new one."""
        if self._extent is None:
            raise TypeError("a step before the start of a run")
        generation, step, epoch = event["generation"], event["step"], event["epoch"]
        skipped = event["skipped"]
        begin = (step - epoch * self._extent.steps) * self._extent.batch
        first, last = event["first"] - begin, event["last"] - begin
        if (
            stretch is not None
            and stretch.end == step
            and stretch.first == first
            and stretch.last == last
            and stretch.epoch == epoch
            and stretch.generation == generation
            and stretch.skipped == skipped
        ):
            stretch.end = step + 1
            return stretch
        _whole(generation, step, epoch, first, last, skipped)
        stretch = Stretch(
            rank=rank,
            generation=generation,
            epoch=epoch,
            start=step,
            end=step + 1,
            first=first,
            last=last,
            skipped=skipped,
        )
        self.generations[generation].stretches.append(stretch)
        return stretch

    def _other(self, rank: int, event: Mapping[str, Any]) -> None:
        number = _whole(event["generation"])
        generation = self.generations[number]
        match event["event"]:
            case "run":
                self._run(rank, number, event)
                generation.world_sizes.add(_whole(event["world_size"]))
            case "restore":
                generation.restores.add(_whole(event["step"]))
                generation.foreign |= event["origin"] is not None
            case "checkpoint":
                generation.saved = max(generation.saved, _whole(event["step"]))
            case "end":
                generation.ended = True

    def _run(self, rank: int, number: int, event: Mapping[str, Any]) -> None:
        if event["samples"] is None:
            raise DataError(
                f"In generation {number}, rank {rank} ran without paceline.loader: its script "
                "chose the samples, so there is no sample order to check them against."
            )
        names = ("samples", "steps", "batch")
        epochs = None if event["epochs"] is None else _whole(event["epochs"])
        extent = Extent(**{name: _whole(event[name]) for name in names}, epochs=epochs)
        unfit = min(extent.batch, extent.samples) < 1
        if unfit or extent.steps != -(-extent.samples // extent.batch):
            raise TypeError(f"{extent} is inconsistent")
        if extent != (self._extent or extent):
            raise DataError(
                f"Rank {rank} recorded {extent} in generation {number}, but another start event "
                f"has {self._extent}: give the folders of one run only."
            )
        if (rank, number) in self._started:
            raise DataError(
                f"Rank {rank} started generation {number} twice: the folders belong to "
                "different runs, or are copies of one run; give the folders of one run only, and "
                "each folder once."
            )
        self._extent = extent
        self._started.add((rank, number))


def _whole(*numbers: Any) -> int:
    """Return the first of some whole numbers."""
    for number in numbers:
        if type(number) is not int:
            raise TypeError(f"{number!r} is not a whole number")
    return numbers[0]  # type: ignore[no-any-return]
