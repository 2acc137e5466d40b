"""Which checkpoints a run may resume from, by their headers alone.

A checkpoint is void if a descendant of its generation started before its step. Checkpoints of
earlier versions have no lineage: their generations are ancestors of all with a higher number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from paceline.cluster.membership.lineage import (
    Lineage,
    committed_apart,
    contains,
    of_values,
    void_by,
)
from paceline.errors import CheckpointError, Message


@dataclass(frozen=True, kw_only=True)
class NumberedLineage:
    """Lineage of a generation, and the generation's number.

    Attributes:
        number: the number of the last generation of the lineage.
        lineage: its ancestors and itself; () if an earlier version of Paceline wrote it.
    """

    number: int
    lineage: Lineage


@dataclass(frozen=True, kw_only=True)
class CheckpointHeader(NumberedLineage):
    """What decides whether a run may resume from a checkpoint.

    Attributes:
        path: the file, in whatever form messages name it.
        step: the number of completed steps that it contains.
    """

    path: Path
    step: int

    @classmethod
    def of_state(cls, path: Path, state: Mapping[str, Any]) -> CheckpointHeader:
        """Return the header of a checkpoint that was read.

        Raises:
            CheckpointError: its lineage is damaged.
        """
        position = state["position"]
        try:
            lineage = of_values(state.get("lineage", ()))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: its lineage is damaged ({error}); use another checkpoint."
            ) from error
        step = position["number"]
        number = position["generation"]
        return cls(path=path, step=step, number=number, lineage=lineage)


def newest_valid(
    headers: Iterable[CheckpointHeader], known: Iterable[NumberedLineage] = ()
) -> tuple[CheckpointHeader, ...]:
    """Return the checkpoints that a run may resume from, the one with the most steps first.

    Void ones are left out, and those of lineages that committed nothing where another one did.

    Args:
        headers: of all readable checkpoints of the run, from all machines.
        known: further lineages of the run, recorded without a checkpoint.

    Raises:
        CheckpointError: two lineages committed steps, and neither contains the other.
    """
    headers = tuple(headers)
    lineages = (*headers, *known)
    valid = [header for header in headers if not _is_void(header, lineages)]
    beaten: set[CheckpointHeader] = set()
    for one, other in combinations([header for header in valid if header.lineage], 2):
        if contains(one.lineage, other.lineage) or contains(other.lineage, one.lineage):
            continue
        apart = [
            committed_apart(one.lineage, one.step, other.lineage),
            committed_apart(other.lineage, other.step, one.lineage),
        ]
        if all(apart):
            raise CheckpointError(_two_lineages(one, other))
        if any(apart):
            beaten.add(other if apart[0] else one)
    standing = [header for header in valid if header not in beaten]
    return tuple(sorted(standing, key=lambda h: (-h.step, -h.number, -len(h.lineage), str(h.path))))


def ancestors_of_start(
    header: CheckpointHeader | None, known: Iterable[NumberedLineage] = ()
) -> Lineage:
    """Return the ancestors of a start's first generation.

    Besides the lineage of its checkpoint, these are later generations of the same lineage that
    wrote none that is left: the start makes their steps void.

    Args:
        header: of the checkpoint from which it resumes; None at the run's beginning.
        known: lineages of the run that were recorded.
    """
    own = header.lineage if header is not None else ()
    longer = [
        each.lineage
        for each in sorted(known, key=lambda each: each.number)
        if not own or contains(each.lineage, own)
    ]
    return longer[-1] if longer else own


def _is_void(header: CheckpointHeader, lineages: Iterable[NumberedLineage]) -> bool:
    if header.lineage:
        generation = header.lineage[-1].id
        return void_by(generation, header.step, (each.lineage for each in lineages)) is not None
    return any(
        ancestor.start < header.step
        for each in lineages
        if each.number > header.number
        for ancestor in each.lineage
    )


def _two_lineages(one: CheckpointHeader, other: CheckpointHeader) -> Message:
    return Message(
        "{} (generation {}, id {}, {} steps) and {} (generation {}, id {}, {} steps) are of two "
        "lineages of the run, which both committed steps, and neither contains the other: remove "
        "the checkpoints of one of them, or give another {--run_id}.",
        *(one.path, one.number, one.lineage[-1].id, one.step),
        *(other.path, other.number, other.lineage[-1].id, other.step),
    )
