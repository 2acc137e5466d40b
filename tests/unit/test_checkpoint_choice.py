"""Which checkpoints a run may resume from, compared with a plain rule over made-up lineages."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.membership.generation import Ancestor
from paceline.cluster.membership.lineage import Lineage, as_values, of_values
from paceline.errors import CheckpointError
from paceline.state.checkpoint_choice import (
    CheckpointHeader,
    NumberedLineage,
    ancestors_of_start,
    newest_valid,
)


def lineage(**starts: int) -> Lineage:
    return tuple(Ancestor(id=name, start=start) for name, start in starts.items())


def header(step: int, number: int = 0, **starts: int) -> CheckpointHeader:
    return CheckpointHeader(
        path=Path(f"step-{step}-{''.join(starts)}.pt"),
        step=step,
        number=number,
        lineage=lineage(**starts),
    )


def test_a_void_checkpoint_is_left_out_however_new() -> None:
    void, start, newer = header(9, a=0), header(7, a=0), header(8, 1, a=0, b=7)
    assert newest_valid([void, start, newer]) == (newer, start)


def test_a_recorded_lineage_without_a_checkpoint_makes_others_void() -> None:
    void, start = header(9, a=0), header(7, a=0)
    known = NumberedLineage(number=1, lineage=lineage(a=0, b=7))
    assert newest_valid([void, start], [known]) == (start,)
    assert newest_valid([void, start]) == (void, start)


def test_a_lineage_that_committed_nothing_is_left_out() -> None:
    other, committed, shared = header(7, 1, a=0, b=7), header(6, 2, a=0, c=5), header(4, a=0)
    assert newest_valid([other, committed, shared]) == (committed, shared)


def test_two_lineages_that_committed_steps_are_refused_with_a_sentence_that_names_both() -> None:
    with pytest.raises(CheckpointError) as error:
        newest_valid([header(8, 1, a=0, b=7), header(6, 2, a=0, c=5)])
    assert str(error.value) == (
        "step-8-ab.pt (generation 1, id b, 8 steps) and step-6-ac.pt (generation 2, id c, 6 steps) "
        "are of two lineages of the run, which both committed steps, and neither contains the "
        "other: remove the checkpoints of one of them, or give another --run_id."
    )


def test_checkpoints_of_earlier_versions_are_void_by_later_generations_alone() -> None:
    earlier, later = header(9, 1), header(9, 3)
    known = NumberedLineage(number=2, lineage=lineage(a=7))
    assert newest_valid([earlier], [known]) == ()
    assert newest_valid([later], [known]) == (later,)  # an earlier version resumed after it
    assert newest_valid([header(7, 1)], [known]) == (header(7, 1),)


def test_the_same_state_of_two_machines_is_no_conflict() -> None:
    one, other = header(7, a=0, b=5), header(7, a=0, b=5)
    assert len(newest_valid([one, other])) == 2


def test_a_start_descends_from_later_generations_of_its_checkpoints_lineage() -> None:
    known = [NumberedLineage(number=1, lineage=lineage(a=0, b=7))]
    assert ancestors_of_start(header(7, a=0), known) == lineage(a=0, b=7)
    assert ancestors_of_start(header(9, 2, a=0, c=8), known) == lineage(a=0, c=8)
    assert ancestors_of_start(None, known) == lineage(a=0, b=7)
    assert ancestors_of_start(header(20, 2), known) == lineage(a=0, b=7)
    assert ancestors_of_start(None) == ()


@pytest.mark.parametrize("value", [5, [["a"]], [["a", "0"]], [[0, 0]], [["a", 1.5]]])
def test_a_damaged_lineage_is_named(value: object) -> None:
    state = {"position": {"number": 3, "generation": 0}, "lineage": value}
    with pytest.raises(CheckpointError, match=r"x\.pt: its lineage is damaged"):
        CheckpointHeader.of_state(Path("x.pt"), state)


def test_a_header_has_what_the_state_has() -> None:
    state = {"position": {"number": 3, "generation": 4}, "lineage": as_values(lineage(a=0, b=2))}
    read = CheckpointHeader.of_state(Path("x.pt"), state)
    assert (read.step, read.number, read.lineage) == (3, 4, lineage(a=0, b=2))
    assert of_values(as_values(read.lineage)) == read.lineage
    del state["lineage"]
    assert CheckpointHeader.of_state(Path("x.pt"), state).lineage == ()


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[CheckpointHeader], Lineage]:
    """Checkpoints of a chain of generations, and the chain."""
    chain: Lineage = ()
    headers, newest = [], 0
    for number in range(draw(st.integers(1, 5))):
        start = draw(st.integers(max(0, newest - 3), newest))
        chain = (*chain, Ancestor(id=f"g{number}", start=start))
        for step in draw(st.lists(st.integers(start, start + 5), max_size=3, unique=True)):
            path = Path(f"{number}-{step}.pt")
            headers.append(CheckpointHeader(path=path, step=step, number=number, lineage=chain))
        newest = max([start, *(h.step for h in headers if h.lineage == chain)])
    return headers, chain


@settings(max_examples=200)
@given(chains())
def test_what_remains_of_a_chain_is_what_no_later_generation_started_before(
    made: tuple[list[CheckpointHeader], Lineage],
) -> None:
    headers, chain = made
    number = len(chain) - 1
    found = newest_valid(headers, [NumberedLineage(number=number, lineage=chain)])
    remaining = {
        h.path for h in headers if all(later.start >= h.step for later in chain[h.number + 1 :])
    }
    assert {h.path for h in found} == remaining
    assert [h.step for h in found] == sorted((h.step for h in found), reverse=True)
