"""Checkpoints in parts of which some are missing: which ones the user hears of."""

from __future__ import annotations

import pytest

from paceline.cluster.membership.generation import Ancestor
from paceline.session.resume.machine_folders import FolderRecord, FoundFile, candidates
from paceline.state.checkpoint_parts import CheckpointIndex
from tests.harness.processes.worlds import world_of

PARTS = ("stage0of2", "stage1of2")


def record(*steps: int, missing: int) -> FolderRecord:
    """Return the record of a folder with checkpoints after some steps; one lacks a part."""
    lineage = (Ancestor(id="g", start=0),)
    names = [
        (step, part) for step in steps for part in PARTS if (step, part) != (missing, PARTS[1])
    ]
    files = [
        FoundFile(
            path=f"step-{step:08}.{part}.pt",
            contents=f"{step}{part}",
            size=1,
            step=step,
            lineage=lineage,
            part=part,
        )
        for step, part in names
    ]
    indexes = [
        CheckpointIndex(paceline=1, step=step, generation="g", parts=PARTS, files=())
        for step in steps
    ]
    return FolderRecord(number=1, count=len(steps), files=tuple(files), indexes=tuple(indexes))


@pytest.mark.parametrize(
    ("missing", "resumed", "notes"),
    [
        (4, 8, []),  # removed, as a newer one was complete
        (8, 4, ["step-00000008.json: a part of this checkpoint is missing or damaged."]),
    ],
)
def test_a_missing_part_is_named_where_the_run_would_have_resumed_from_it(
    missing: int, resumed: int, notes: list[str]
) -> None:
    generation = world_of((1,), 0).generation
    found, said = candidates({0: record(4, 8, missing=missing)}, generation)
    assert [each.file.step for each in found] == [resumed]
    assert said == notes
