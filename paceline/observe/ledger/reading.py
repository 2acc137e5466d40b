"""Reads events into a history, line by line: what is kept grows with changes, not with steps.

Only an event's fields are checked here: that they are there, are whole numbers, and that all files
are of one run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from paceline.errors import DataError
from paceline.observe.ledger.history import Extent, GenerationRecords, Stretch

Events = Iterable[Mapping[str, Any]]


class _Start(NamedTuple):
    """Start of a generation in a member's file."""

    generation: int
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
        generations: the records of each generation, by its number.
        members: the members that have an event file.

    Raises:
        DataError: an event lacks a field, or the files are those of different runs.
    """

    def __init__(self, files: Iterable[tuple[str, Events]]) -> None:
        self.generations: dict[int, GenerationRecords] = defaultdict(GenerationRecords)
        self.members: set[str] = set()
        self._started: set[tuple[int, int]] = set()  # (generation, rank)
        self._cuts: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal ones are one object
        self._extent: Extent | None = None
        for member, events in files:
            self._read(member, events)
        if self._extent is None:
            raise DataError(
                "No rank has written the start of a run: the run hasn't begun, or it ended "
                "before it wrote its start event; start it again with the same command."
            )
        self.extent: Extent = self._extent

    def _read(self, member: str, events: Events) -> None:
        self.members.add(member)
        start = stretch = None
        for number, event in enumerate(events, start=1):
            try:
                if event["event"] == "step":
                    stretch = self._step(member, start, event, stretch)
                elif event["event"] == "run":
                    if start is not None:
                        self.generations[start.generation].left.add(start.rank)
                    start = self._run(member, event)
                elif "generation" in event:
                    self._other(event)
            except (KeyError, TypeError) as error:
                what = f"{error} is missing" if isinstance(error, KeyError) else error
                raise DataError(
                    f"Event {number} of {member}, {dict(event)}, can't be used ({what}): it was "
                    "damaged, or another version of Paceline wrote it."
                ) from error

    def _step(
        self, member: str, start: _Start | None, event: Mapping[str, Any], stretch: Stretch | None
    ) -> Stretch:
        """Lengthen the stretch by a step, or begin a new one."""
        if self._extent is None or start is None:
            raise TypeError("a step before the start of a run")
        generation, step, epoch = event["generation"], event["step"], event["epoch"]
        skipped = event["skipped"]
        begin = (step - epoch * self._extent.steps) * self._extent.batch
        first, last = event["first"] - begin, event["last"] - begin
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
        stretch = Stretch(
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
        self.generations[generation].stretches.append(stretch)
        return stretch

    def _other(self, event: Mapping[str, Any]) -> None:
        generation = self.generations[_whole(event["generation"])]
        match event["event"]:
            case "restore":
                generation.restores.add(_whole(event["step"]))
                generation.foreign |= event["origin"] is not None
            case "checkpoint":
                generation.saved = max(generation.saved, _whole(event["step"]))
            case "end":
                generation.ended = True

    def _run(self, member: str, event: Mapping[str, Any]) -> _Start:
        number, rank = _whole(event["generation"]), _whole(event["rank"])
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
        extent = Extent(**{name: _whole(event[name]) for name in names}, epochs=epochs)
        unfit = min(extent.batch, extent.samples) < 1
        if unfit or extent.steps != -(-extent.samples // extent.batch):
            raise TypeError(f"{extent} is inconsistent")
        if extent != (self._extent or extent):
            raise DataError(
                f"Rank {rank} recorded {extent} in generation {number}, but another start event "
                f"has {self._extent}: give the folders of one run only."
            )
        if len(members) != world_size or members[rank : rank + 1] != (member,):
            raise TypeError(f"{member} isn't rank {rank} of these members")
        if (number, rank) in self._started:
            raise DataError(
                f"Rank {rank} started generation {number} twice: the folders belong to "
                "different runs, or are copies of one run; give the folders of one run only, and "
                "each folder once."
            )
        self._extent = extent
        self._started.add((number, rank))
        self.generations[number].members.add(members)
        return _Start(number, rank, world_size)


def _whole(*numbers: Any) -> int:
    """Return the first of some whole numbers."""
    for number in numbers:
        if type(number) is not int:
            raise TypeError(f"{number!r} is not a whole number")
    return numbers[0]  # type: ignore[no-any-return]
