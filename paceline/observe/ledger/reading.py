"""Reads events into a history, line by line: what is kept grows with changes, not with steps.

Only an event's fields are checked here: that they are there, are whole numbers, and that all files
are of one run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from paceline.cluster.membership.lineage import Lineage, of_values
from paceline.errors import DataError
from paceline.observe.ledger.history import Extent, GenerationRecords, Stretch

Events = Iterable[Mapping[str, Any]]


class _Start(NamedTuple):
    """Start of a generation in a member's file."""

    generation: GenerationRecords
    rank: int
    world_size: int


class History:
    """History of a run, read from all of its event files in one pass.

    Args:
        files: pairs of a member, as `GenerationRecords.members` names it, and its events in the
            order in which they were written. `rank <r>` may have several files, from several
            machines.

    Attributes:
        extent: the run's expected size.
        generations: the records of each generation, by its key.
        members: the members that have an event file.

    Raises:
        DataError: an event lacks a field, or the files are those of different runs.
    """

    def __init__(self, files: Iterable[tuple[str, Events]]) -> None:
        self.generations: dict[str, GenerationRecords] = {}
        self.members: set[str] = set()
        self._started: set[tuple[str, int]] = set()  # (generation's key, rank)
        # By number: lines that follow no start of their generation in their file.
        self._strays: dict[int, GenerationRecords] = {}
        self._cuts: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal ones are one object
        self._extent: Extent | None = None
        self._epochs: dict[int, int | None] = {}  # of the run, by a generation's number
        for member, events in files:
            self._read(member, events)
        for number, stray in self._strays.items():
            of_number = (each for each in self.generations.values() if each.number == number)
            known = min(of_number, key=lambda each: each.key, default=None)
            if known is None:
                self.generations[stray.key] = stray
            else:
                known.add(stray)
        if self._extent is None:
            raise DataError(
                "No rank has written the start of a run: the run hasn't begun, or it ended "
                "before it wrote its start event; start it again with the same command."
            )
        self.extent: Extent = self._extent

    def _read(self, member: str, events: Events) -> None:
        self.members.add(member)
        start = stretch = None
        counts = True
        started: dict[int, GenerationRecords] = {}  # in this file, by number
        for number, event in enumerate(events, start=1):
            try:
                if event["event"] == "run":
                    counts = event.get("counts", True)
                if not counts and event["event"] in ("run", "step"):
                    continue  # another member of the replica counts the same samples
                if event["event"] == "step":
                    following = self._step(member, start, event, stretch)
                    if following is not stretch:
                        stretch = following
                        self._records(started, stretch.generation).stretches.append(stretch)
                elif event["event"] == "run":
                    if start is not None:
                        start.generation.left.add(start.rank)
                    start = self._run(member, event)
                    stretch = None
                    started[start.generation.number] = start.generation
                elif "generation" in event:
                    self._other(self._records(started, _whole(event["generation"])), event)
            except (KeyError, TypeError) as error:
                what = f"{error} is missing" if isinstance(error, KeyError) else error
                line = json.dumps(dict(event))
                raise DataError(
                    f"Event {number} of {member}, {line}, can't be used ({what}): it was damaged, "
                    "or another version of Paceline wrote it."
                ) from error

    def _records(self, started: Mapping[int, GenerationRecords], number: int) -> GenerationRecords:
        """Return the records of the generation that a line of a file names by its number."""
        if number in started:
            return started[number]
        return self._strays.setdefault(number, GenerationRecords(key=f"#{number}", number=number))

    def _step(
        self, member: str, start: _Start | None, event: Mapping[str, Any], stretch: Stretch | None
    ) -> Stretch:
        """Lengthen the stretch by a step, or return a new one."""
        if self._extent is None or start is None:
            raise TypeError("a step before the start of a run")
        generation = event["generation"]
        step = event["step"]
        epoch = event["epoch"]
        skipped = event["skipped"]
        begin = (step - epoch * self._extent.steps) * self._extent.batch
        first = event["first"] - begin
        last = event["last"] - begin
        cuts = tuple([cut - begin for cut in event.get("cuts", ())])
        if (
            stretch is not None
            and stretch.end == step
            and stretch.first == first
            and stretch.last == last
            and stretch.cuts == cuts
            and stretch.epoch == epoch
            and stretch.generation == generation
            and stretch.skipped == skipped
        ):
            stretch.end = step + 1
            return stretch
        _whole(generation, step, epoch, first, last, skipped, *cuts)
        if cuts and len(cuts) != start.world_size + 1:
            raise TypeError(f"{len(cuts)} cuts for {start.world_size} ranks")
        return Stretch(
            member=member,
            rank=start.rank,
            generation=generation,
            epoch=epoch,
            start=step,
            end=step + 1,
            first=first,
            last=last,
            cuts=self._cuts.setdefault(cuts, cuts),
            skipped=skipped,
        )

    def _other(self, generation: GenerationRecords, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "restore":
                generation.restores.add(_whole(event["step"]))
                generation.foreign |= event["origin"] is not None
            case "checkpoint":
                generation.saved = max(generation.saved, _whole(event["step"]))
            case "end":
                generation.ended = True

    def _run(self, member: str, event: Mapping[str, Any]) -> _Start:
        number = _whole(event["generation"])
        rank = _whole(event["rank"])
        world_size = _whole(event["world_size"])
        if "members" in event:
            members = tuple(f"member {each}" for each in event["members"])
        else:
            members = tuple(f"rank {each}" for each in range(world_size))
        if event["samples"] is None:
            raise DataError(
                f"In generation {number}, rank {rank} ran without paceline.loader: its script "
                "chose the samples, so there is no sample order to check them against."
            )
        names = ("samples", "steps", "batch")
        epochs = None if event["epochs"] is None else _whole(event["epochs"])
        drawn = bool(event.get("drawn", False))
        extent = Extent(**{name: _whole(event[name]) for name in names}, epochs=epochs, drawn=drawn)
        unfit = min(extent.batch, extent.samples) < 1
        if unfit or extent.steps != -(-extent.samples // extent.batch):
            raise TypeError(f"{extent} is inconsistent")
        known = extent if self._extent is None else self._extent.prolonged(extent)
        if known is None or self._epochs.setdefault(number, epochs) != epochs:
            raise DataError(
                f"Rank {rank} recorded {extent} in generation {number}, but another start recorded "
                f"{self._extent}: give the folders of one run only."
            )
        if len(members) != world_size or members[rank : rank + 1] != (member,):
            raise TypeError(f"{member} isn't rank {rank} of these members")
        lineage = _lineage(event)
        key = lineage[-1].id if lineage else f"#{number}"
        if (key, rank) in self._started:
            raise DataError(
                f"Rank {rank} started generation {number} twice: the folders belong to "
                "different runs, or are copies of one run; give the folders of one run only, and "
                "each folder once."
            )
        self._extent = known
        generation = self.generations.setdefault(key, GenerationRecords(key=key, number=number))
        generation.total = extent.total
        if generation.number != number:
            raise TypeError(f"generation {key} has number {generation.number} in another file")
        self._started.add((key, rank))
        generation.members.add(members)
        if lineage:
            generation.headers.add(lineage)
        return _Start(generation, rank, world_size)


def _lineage(event: Mapping[str, Any]) -> Lineage:
    """Return the lineage that a start of a generation records; () in an earlier version."""
    if "id" not in event:
        return ()
    try:
        return of_values([*event["ancestors"], [event["id"], event["start"]]])
    except ValueError as error:
        raise TypeError(f"its ancestors aren't pairs of an id and a start: {error}") from error


def _whole(*numbers: Any) -> int:
    """Return the first of some whole numbers."""
    for number in numbers:
        if type(number) is not int:
            raise TypeError(f"{number!r} is not a whole number")
    return numbers[0]  # type: ignore[no-any-return]
