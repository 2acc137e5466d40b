"""Adds up each epoch's samples, segment by segment, and says what isn't exact.

In each step that is owed the shares of the generation that answers for it must tile the batch.
Every line has the shares of all ranks, of which its member's own counts; the others are compared,
and count where their own members' last lines are missing.
Among the steps under way, which not all ranks have passed, nothing may stand twice, and no rank may
have left out a step and written a later one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from paceline.observe.ledger.faults import Fault, contradictions, misplaced, substitutions
from paceline.observe.ledger.history import Extent
from paceline.observe.ledger.lineages import conflicts, timelines
from paceline.observe.ledger.periods import Timeline
from paceline.observe.ledger.reading import Events, History
from paceline.observe.ledger.segments import segments
from paceline.observe.ledger.tiling import size, tile

KEPT = 20  # faults in a proof; the others are counted


@dataclass(kw_only=True)
class EpochAccount:
    """Sample counts of one epoch; if the epoch is exact, `owed` is `once + skipped`.

    Attributes:
        epoch: the epoch, from 0.
        owed: samples that must have been trained.
        committed: samples among `owed` whose steps can't be undone (see `Proof.committed`).
        once: samples trained once.
        substituted: samples among `once` that only other members' lines prove.
        skipped: samples read once and left out, because their records are bad.
        lost: samples trained by no rank.
        twice: samples trained more than once, plus samples trained outside their batch.
    """

    epoch: int
    owed: int
    committed: int
    once: int = 0
    substituted: int = 0
    skipped: int = 0
    lost: int = 0
    twice: int = 0


@dataclass(frozen=True, kw_only=True)
class GenerationAccount:
    """What the files say of one generation.

    Attributes:
        number: its number; None if it is known only as an ancestor of another one.
        id: its id; "" in a generation of an earlier version.
        start: the number of completed steps from which it started.
        first: the first step for which its lines count, from 0.
        end: the step after the last one; equal to `first` if none of its lines counts.
        members: its members' ids in rank order, or `rank <r>` in one of an earlier version; () if
            it has no event file.
        in_lineage: whether it belongs to the lineage that the run committed.
    """

    number: int | None
    id: str
    start: int
    first: int
    end: int
    members: tuple[str, ...]
    in_lineage: bool


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Result of the ledger: what a run's event files prove.

    Attributes:
        extent: the run's expected size.
        starts: number of generations with records: starts of the run, and returns to a snapshot.
        base: number of steps in the checkpoint of another run from which this run started; 0 if
            there is none. These steps are not checked here.
        committed, done, begun: as of `Timeline`.
        generations: the generations that started, or that others name as ancestors, in order.
        accounts: the sample counts of each epoch up to `done`.
        faults: the first few faults.
        fault_count: the number of all faults.
        notes: sentences on members whose lines are missing without harm, because other members'
            lines prove their samples.
    """

    extent: Extent
    starts: int
    base: int
    committed: int
    done: int
    begun: int
    generations: tuple[GenerationAccount, ...]
    accounts: tuple[EpochAccount, ...]
    faults: tuple[Fault, ...]
    fault_count: int
    notes: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Return whether each sample was trained once, as far as the run went."""
        return self.fault_count == 0


def prove(files: Iterable[tuple[str, Events]]) -> Proof:
    """Account for every sample of a run.

    Args:
        files: the files as `event_file.find_event_files` orders and names them, each with its
            events.

    Raises:
        DataError: an event lacks a field, or the files are those of different runs.
    """
    history = History(files)
    extent = history.extent
    (times, *others) = timelines(history)
    base = times.periods[0].start
    accounts = {
        epoch: EpochAccount(
            epoch=epoch,
            owed=extent.reached(epoch, times.done) - extent.reached(epoch, base),
            committed=extent.reached(epoch, times.committed) - extent.reached(epoch, base),
        )
        for epoch in range(base // extent.steps, -(-times.done // extent.steps))
    }
    notes: list[str] = []
    faults = chain(
        (
            Fault(text=text, generation=times.periods[-1].number)
            for text in conflicts(history, [times, *others])
        ),
        _faults(history, times, accounts, notes),
    )
    first_faults = tuple(islice(faults, KEPT))
    return Proof(
        extent=extent,
        starts=len(history.generations),
        base=base,
        committed=times.committed,
        done=times.done,
        begun=times.begun,
        generations=tuple(_generations(history, times, others)),
        accounts=tuple(accounts.values()),
        faults=first_faults,
        fault_count=len(first_faults) + sum(1 for _ in faults),
        notes=tuple(notes),
    )


def _generations(
    history: History, times: Timeline, others: Iterable[Timeline]
) -> Iterator[GenerationAccount]:
    """Yield the accounts of the committed lineage's generations, then those of the others."""
    named = dict.fromkeys(times.lineage, True)
    named |= {each: False for other in others for each in other.lineage if each not in named}
    counted = {period.generation.key: (period.start, period.end) for period in times.periods}
    for ancestor, in_lineage in named.items():
        generation = history.generations.get(ancestor.id)
        first, end = counted.get(ancestor.id, (ancestor.start, ancestor.start))
        members = max(generation.members, key=len, default=()) if generation else ()
        yield GenerationAccount(
            number=generation.number if generation else None,
            id="" if ancestor.id.startswith("#") else ancestor.id,
            start=ancestor.start,
            first=first,
            end=max(first, min(end, times.begun)),
            members=tuple(member.removeprefix("member ") for member in members),
            in_lineage=in_lineage,
        )


def _faults(
    history: History, times: Timeline, accounts: dict[int, EpochAccount], notes: list[str]
) -> Iterator[Fault]:
    """Fill the accounts and the notes; yield what isn't right."""
    for period in times.periods:
        for text in contradictions(history, period):
            yield Fault(text=text, generation=period.number)
    for period in times.periods:
        substituted: Counter[int] = Counter()
        for segment in segments(history.extent, period, times):
            right = [
                share
                for share in segment.shares
                if share.epoch == segment.epoch and 0 <= share.skipped <= share.last - share.first
            ]
            strays = [share for share in segment.shares if share not in right]
            tiling = tile(((share.first, share.last) for share in right), segment.length)
            steps = segment.end - segment.start
            if segment.owed:
                skipped = sum(share.skipped for share in right)
                account = accounts[segment.epoch]
                account.once += steps * (tiling.once - skipped)
                account.skipped += steps * skipped
                account.lost += steps * size(tiling.lost)
                account.twice += steps * size(tiling.twice)
                for share in segment.substituted:
                    substituted[share.rank] += steps * (share.last - share.first)
                    account.substituted += steps * (share.last - share.first)
            for text in misplaced(segment, tiling, strays):
                yield Fault(text=text, generation=period.number, step=segment.start, steps=steps)
        notes.extend(substitutions(history, period, substituted))
