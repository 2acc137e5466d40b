"""Lineages: which generation descends from which, and which of its steps are void by that.

    generation a    0 ─────────────────── 7 · · · · 9        steps 8, 9 are void by b
    generation b                          7 ─────────── 12
    generation c                          7 ── 9             another lineage: a, c

A step is named by the number of completed steps after it. A descendant that started from step s
makes void what its ancestors have of later steps; step s itself stays, because it started from it.
Each prefix of a lineage is the lineage of an ancestor, which needn't have left any file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.cluster.membership.generation import Ancestor

Lineage = tuple[Ancestor, ...]
"""A generation's ancestors and itself, the oldest first."""


def void_by(generation: str, step: int, lineages: Iterable[Lineage]) -> Ancestor | None:
    """Return the descendant that makes a ledger line or a checkpoint void; None if it is valid.

    Args:
        generation: the id of the generation that wrote it.
        step: the number of completed steps after it.
        lineages: all that are known.

    Returns:
        of the descendants that started before the step, the one with the earliest start.
    """
    descendants = (
        later
        for lineage in lineages
        for number, ancestor in enumerate(lineage)
        if ancestor.id == generation
        for later in lineage[number + 1 :]
    )
    voiding = (later for later in descendants if later.start < step)
    return min(voiding, key=lambda later: (later.start, later.id), default=None)


def contains(lineage: Lineage, other: Lineage) -> bool:
    """Return whether a lineage contains another one: its last generation is in it."""
    return not other or any(ancestor.id == other[-1].id for ancestor in lineage)


def first_apart(lineage: Lineage, other: Lineage) -> Ancestor | None:
    """Return the generation with the earliest start that another lineage lacks; None without."""
    shared = {ancestor.id for ancestor in other}
    apart = (ancestor for ancestor in lineage if ancestor.id not in shared)
    return min(apart, key=lambda ancestor: ancestor.start, default=None)


def committed_apart(lineage: Lineage, committed: int, other: Lineage) -> bool:
    """Return whether a lineage committed steps that another one lacks.

    Args:
        committed: the number of steps that it committed.
    """
    first = first_apart(lineage, other)
    return first is not None and committed > first.start


def as_values(lineage: Iterable[Ancestor]) -> list[list[Any]]:
    """Return a lineage as plain values for a file: a list of [id, start]."""
    return [[ancestor.id, ancestor.start] for ancestor in lineage]


def of_values(values: Sequence[Sequence[Any]]) -> Lineage:
    """Read what `as_values` returned.

    Raises:
        TypeError, ValueError: the values are something else.
    """
    lineage = tuple(Ancestor(id=id_, start=start) for id_, start in values)
    for ancestor in lineage:
        # The values come from a file: a damaged one must not be taken for another lineage. A bool,
        # which isinstance would take for an int, is none.
        if type(ancestor.id) is not str or type(ancestor.start) is not int:
            raise TypeError(f"{ancestor} isn't a generation's id and start")
    return lineage
