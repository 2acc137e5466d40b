"""Which generations of a run descend from which, by all headers, and which lineage is the run's.

    #0 ── #1 ── a ── b ── c         c is known by the ancestors of d alone: it never formed, or all
                │         └ d       of its files are missing
                └ e                 a lineage that committed nothing is left out

Generations of earlier versions (#0) recorded no ancestors: they descend from all that have a lower
number, and all with a higher number descend from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

from paceline.cluster.membership.generation import Ancestor
from paceline.cluster.membership.lineage import (
    Lineage,
    committed_apart,
    first_apart,
)
from paceline.observe.ledger.history import GenerationRecords
from paceline.observe.ledger.periods import Timeline, timeline
from paceline.observe.ledger.reading import History


def timelines(history: History) -> list[Timeline]:
    """Return the timelines of all lineages that aren't a part of another, the run's own first."""
    lineages = lineages_of(history.generations)
    inner = {ancestor.id for lineage in lineages.values() for ancestor in lineage[:-1]}
    tips = [lineage for key, lineage in lineages.items() if key not in inner]
    found = [timeline(history, tip) for tip in tips or [()]]
    beaten = {
        id(loser)
        for one, other in combinations(found, 2)
        for winner, loser in ((one, other), (other, one))
        if _apart(winner, loser) and not _apart(loser, winner)
    }
    numbers = {key: generation.number for key, generation in history.generations.items()}
    return sorted(
        found,
        key=lambda times: (
            id(times) in beaten,
            *((-numbers[times.lineage[-1].id], times.lineage[-1].id) if times.lineage else ()),
        ),
    )


def conflicts(history: History, times: Iterable[Timeline]) -> list[str]:
    """Return a sentence on each pair of lineages that both committed steps."""
    return [
        f"Two lineages committed steps, and neither descends from the other: that of "
        f"{_name(history, one, other)}, and that of {_name(history, other, one)}. Give the "
        "folders of one of them only."
        for one, other in combinations(times, 2)
        if _apart(one, other) and _apart(other, one)
    ]


def lineages_of(generations: Mapping[str, GenerationRecords]) -> dict[str, Lineage]:
    """Return the lineage of each generation that recorded its start, by its key."""
    found: dict[str, Lineage] = {}
    for key, generation in sorted(generations.items(), key=lambda item: (item[1].number, item[0])):
        if generation.start is None:
            continue  # it ended before its first step
        before: dict[str, Ancestor] = {}
        for earlier, lineage in found.items():
            recorded = generations[earlier].headers and generation.headers
            if generations[earlier].number < generation.number and not recorded:
                before.update((each.id, each) for each in lineage if each.id not in before)
        for each in generation.ancestors:
            before.setdefault(each.id, found[each.id][-1] if each.id in found else each)
        before.pop(key, None)
        found[key] = (*before.values(), Ancestor(id=key, start=generation.start))
    return found


def _apart(one: Timeline, other: Timeline) -> bool:
    return committed_apart(one.lineage, one.committed, other.lineage)


def _name(history: History, times: Timeline, other: Timeline) -> str:
    """Name the first generation that another lineage lacks."""
    first = first_apart(times.lineage, other.lineage)
    assert first is not None
    generation = history.generations.get(first.id)
    number = "" if generation is None else f" {generation.number}"
    return (
        f"generation{number} (id {first.id}), which started after {first.start:,} steps and "
        f"committed up to {times.committed:,}"
    )
