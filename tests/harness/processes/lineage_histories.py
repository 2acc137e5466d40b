"""Made-up generations of a run, with branches and returns, and what their lines prove by counting.

    run = LineageHistory()
    first = run.generation(parent=None, start=0, ends=[5, 6], members=[0, 1], saved=[2])
    second = run.generation(parent=first, start=4, ends=[9], members=[0])

It shares nothing with the tested code but the format of a line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SAMPLES, BATCH, EPOCHS = 14, 4, 5  # the last batch of an epoch is short
STEPS = -(-SAMPLES // BATCH)
TOTAL = STEPS * EPOCHS


@dataclass(kw_only=True)
class MadeUpGeneration:
    """One generation.

    Attributes:
        number: its number.
        id: its id.
        chain: the generations from which it descends, and itself.
        start: the number of completed steps from which it starts.
        ends: for each rank the step before which it ends; () if it never formed.
        members: the numbers of its members, in rank order.
        saved: the numbers of steps in its checkpoints.
    """

    number: int
    id: str
    chain: list[MadeUpGeneration] = field(default_factory=list, repr=False)
    start: int
    ends: Sequence[int]
    members: Sequence[int]
    saved: Sequence[int]


@dataclass
class LineageHistory:
    """A run's generations.

    Attributes:
        generations: the generations in the order of their numbers.
        events: the events of each member, by its number.
    """

    generations: list[MadeUpGeneration] = field(default_factory=list)
    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def generation(
        self,
        *,
        parent: MadeUpGeneration | None,
        start: int,
        ends: Sequence[int],
        members: Sequence[int],
        saved: Sequence[int] = (),
    ) -> MadeUpGeneration:
        """Add a generation, and the events of its members."""
        number = len(self.generations)
        made = MadeUpGeneration(
            number=number,
            id=f"id{number}",
            start=start,
            ends=ends,
            members=members,
            saved=saved,
        )
        made.chain = [*(parent.chain if parent else []), made]
        self.generations.append(made)
        for rank in range(len(ends)):
            self.events.setdefault(members[rank], []).extend(_events(made, rank))
        return made

    def files(self, lost: Collection[int] = ()) -> list[tuple[str, list[dict[str, Any]]]]:
        """Return the files of all members but the lost ones, as the reader wants them."""
        files = sorted(self.events.items())
        return [(f"member a-{member}", events) for member, events in files if member not in lost]

    def counts(
        self, tip: MadeUpGeneration, lost: Collection[int] = (), *, below: int
    ) -> Mapping[int, Counter[int]]:
        """Return how often each position of the steps below `below` was trained, by all lines.

        A line counts if the tip descends from its generation, and no descendant on the way started
        before the number of steps after it. A step is proved by any of its ranks' lines.
        """
        counted: dict[int, Counter[int]] = {step: Counter() for step in range(below)}
        for place, made in enumerate(tip.chain):
            later = [each.start for each in tip.chain[place + 1 :]]
            for step in range(made.start, min(below, max(made.ends, default=0))):
                if any(start < step + 1 for start in later):
                    continue
                known = [
                    rank
                    for rank, end in enumerate(made.ends)
                    if made.members[rank] not in lost and end > step
                ]
                if known:
                    cuts = cuts_of(step, len(made.members))
                    counted[step].update(range(cuts[0], cuts[-1]))
        return counted


def cuts_of(step: int, world: int) -> list[int]:
    """Divide a batch into slices, as equal as can be."""
    first = step % STEPS * BATCH
    size = min(BATCH, SAMPLES - first)
    return [first + size * rank // world for rank in range(world + 1)]


def _events(made: MadeUpGeneration, rank: int) -> Iterator[dict[str, Any]]:
    size = {"samples": SAMPLES, "steps": STEPS, "epochs": EPOCHS, "batch": BATCH}
    yield {
        "event": "run",
        "generation": made.number,
        "id": made.id,
        "start": made.start,
        "ancestors": [[each.id, each.start] for each in made.chain[:-1]],
        "rank": rank,
        "world_size": len(made.members),
        "members": [f"a-{member}" for member in made.members],
        **size,
    }
    yield {"event": "restore", "generation": made.number, "step": made.start, "origin": None}
    for step in range(made.start, made.ends[rank]):
        cuts = cuts_of(step, len(made.members))
        yield {
            "event": "step",
            "generation": made.number,
            "step": step,
            "epoch": step // STEPS,
            "first": cuts[rank],
            "last": cuts[rank + 1],
            "cuts": cuts,
            "skipped": 0,
        }
        if rank == 0 and step + 1 in made.saved:
            yield {"event": "checkpoint", "generation": made.number, "step": step + 1}
