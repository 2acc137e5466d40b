"""The ledger over generations: chains, branches, generations that never formed, lost files."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.membership.generation import Ancestor
from paceline.cluster.membership.lineage import void_by
from paceline.observe.ledger import Proof, prove
from tests.harness.processes.lineage_histories import (
    STEPS,
    TOTAL,
    LineageHistory,
    MadeUpGeneration,
)


@st.composite
def chains(draw: st.DrawFn) -> LineageHistory:
    """Chains of generations: members die and join, some generations never form, steps roll back."""
    run = LineageHistory()
    tip, members, new = None, list(range(draw(st.integers(1, 3)))), 10
    committed = 0
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(max(0, committed - 2), committed))
        reached = draw(st.integers(start, min(TOTAL, start + 6)))
        formed = tip is None or draw(st.integers(0, 3)) > 0
        ahead = [draw(st.integers(0, 2)) for _ in members]
        ends = [min(TOTAL, reached + more) for more in ahead] if formed else []
        saved = draw(st.lists(st.integers(start, reached), max_size=2)) if formed else []
        tip = run.generation(parent=tip, start=start, ends=ends, members=members, saved=saved)
        committed = reached if formed else start
        left = draw(st.lists(st.sampled_from(members), unique=True, max_size=len(members) - 1))
        joined = list(range(new, new + draw(st.integers(0, 1))))
        new += len(joined)
        members = [member for member in members if member not in left] + joined
    return run


def once(proof: Proof) -> list[int]:
    return [account.once for account in proof.accounts]


def counted(run: LineageHistory, tip: MadeUpGeneration, proof: Proof, lost: set[int]) -> list[int]:
    """Count by brute force what `once` should be."""
    counts = run.counts(tip, lost, below=proof.done)
    assert all(times == 1 for step in counts.values() for times in step.values())
    epochs = range(-(-proof.done // STEPS))
    return [
        sum(len(count) for step, count in counts.items() if step // STEPS == epoch)
        for epoch in epochs
    ]


@settings(max_examples=100)
@given(chains())
def test_a_chain_of_generations_is_exact(run: LineageHistory) -> None:
    proof = prove(run.files())
    tip = max((each for each in run.generations if each.ends), key=lambda each: each.number)
    assert proof.exact, proof.faults
    assert proof.notes == ()
    assert proof.committed >= tip.start
    assert once(proof) == counted(run, tip, proof, set())
    assert [each.id for each in proof.generations] == [each.id for each in tip.chain]


@settings(max_examples=150)
@given(chains(), st.data())
def test_the_files_that_are_left_prove_what_any_member_of_each_generation_recorded(
    run: LineageHistory, data: st.DataObject
) -> None:
    lost = data.draw(st.sets(st.sampled_from(sorted(run.events)), max_size=len(run.events) - 1))
    known = [
        each for each in run.generations if any(m not in lost for m in each.members) and each.ends
    ]
    proof = prove(run.files(lost))
    expected = counted(run, known[-1], proof, lost)
    assert once(proof) == expected
    assert proof.exact == (sum(expected) == sum(account.owed for account in proof.accounts))
    assert sum(account.twice for account in proof.accounts) == 0


@settings(max_examples=100)
@given(chains(), st.data())
def test_last_lines_that_a_dead_member_lost_are_proved_by_the_others(
    run: LineageHistory, data: st.DataObject
) -> None:
    last = run.generations[-1].members
    together = [each.members for each in run.generations]
    dead = [
        member
        for member in sorted(run.events)
        if member not in last and all(len(them) > 1 for them in together if member in them)
    ]
    for member in dead[:1]:
        run.events[member] = run.events[member][: data.draw(st.integers(2, 9))]
    proof = prove(run.files())
    assert proof.exact, proof.faults


def branched(first_saved: list[int], second_saved: list[int]) -> LineageHistory:
    """Two generations that started from the same one, after 3 and 5 steps."""
    run = LineageHistory()
    root = run.generation(parent=None, start=0, ends=[6, 6], members=[0, 1], saved=[3, 5])
    run.generation(parent=root, start=3, ends=[7], members=[0], saved=first_saved)
    run.generation(parent=root, start=5, ends=[9], members=[1], saved=second_saved)
    return run


def test_two_lineages_that_both_committed_steps_are_a_fault_that_names_both() -> None:
    proof = prove(branched([4], [8]).files())
    assert [fault.text for fault in proof.faults] == [
        "Two lineages committed steps, and neither descends from the other: that of generation 2 "
        "(id id2), which started after 5 steps and committed up to 8, and that of generation 1 (id "
        "id1), which started after 3 steps and committed up to 4. Give the folders of one of them "
        "only."
    ]


def test_a_lineage_that_committed_nothing_is_left_out() -> None:
    for saved, winner, done in (([6], 1, 7), ([], 2, 9)):
        run = branched(saved, [8] if winner == 2 else [])
        proof = prove(run.files())
        assert proof.exact, proof.faults
        assert proof.done == done
        assert once(proof) == counted(run, run.generations[winner], proof, set())
        left_out = [each.id for each in proof.generations if not each.in_lineage]
        assert left_out == [f"id{3 - winner}"]


def test_of_lineages_that_committed_nothing_the_newest_counts() -> None:
    proof = prove(branched([], []).files())
    assert proof.exact
    assert (proof.done, proof.committed) == (9, 5)


def test_a_descendant_of_a_generation_that_never_formed_makes_steps_void() -> None:
    """Its own header alone says that it descends from the first one."""
    run = LineageHistory()
    first = run.generation(parent=None, start=0, ends=[6], members=[0])
    never = run.generation(parent=first, start=4, ends=[], members=[0, 1])
    run.generation(parent=never, start=4, ends=[8], members=[0])
    proof = prove(run.files())
    assert proof.exact, proof.faults
    assert [(each.number, each.first, each.end) for each in proof.generations] == [
        (0, 0, 4),
        (None, 4, 4),
        (2, 4, 8),
    ]


def test_a_generation_without_any_file_has_lost_samples_and_is_named() -> None:
    run = LineageHistory()
    first = run.generation(parent=None, start=0, ends=[6], members=[0])
    lost = run.generation(parent=first, start=4, ends=[8], members=[1])
    run.generation(parent=lost, start=7, ends=[9], members=[2])
    proof = prove(run.files({1}))
    assert sum(account.lost for account in proof.accounts) == 12
    assert proof.faults[0].text.startswith("No event file of generation id1, which started after 4")


def test_a_start_that_contradicts_the_header_is_a_fault() -> None:
    run = LineageHistory()
    first = run.generation(parent=None, start=0, ends=[6], members=[0])
    run.generation(parent=first, start=4, ends=[8], members=[0])
    restore = [event for event in run.events[0] if event["event"] == "restore"][-1]
    restore["step"] = 5
    fault, *_ = prove(run.files()).faults
    assert fault.text == (
        "It started after 4 steps, but its ranks recorded that they resumed at step 5."
    )


def test_a_start_within_a_step_of_several_batches_is_where_its_ranks_resumed() -> None:
    run = LineageHistory()
    first = run.generation(parent=None, start=0, ends=[6], members=[0])
    second = run.generation(parent=first, start=4, ends=[7], members=[0])
    run.generation(parent=second, start=6, ends=[9], members=[0])
    for event in run.events[0]:  # their headers name the last batch of the step
        if event["event"] == "run":
            event["start"] += 1 if event["start"] else 0
            event["ancestors"] = [
                [id_, start + 1 if start else 0] for id_, start in event["ancestors"]
            ]
    proof = prove(run.files())
    assert proof.exact, proof.faults
    assert [each.start for each in proof.generations] == [0, 4, 6]


def test_generations_of_one_number_are_told_apart_by_their_ids() -> None:
    run = branched([], [8])
    for event in run.events[1]:
        if event.get("generation") == 2:
            event["generation"] = 1
    proof = prove(run.files())
    assert proof.exact, proof.faults
    assert [(each.number, each.id) for each in proof.generations] == [
        (0, "id0"),
        (1, "id2"),
        (1, "id1"),
    ]


def test_a_step_is_void_from_after_the_start_of_any_descendant() -> None:
    a, b, c = Ancestor(id="a", start=0), Ancestor(id="b", start=7), Ancestor(id="c", start=9)
    lineages = [(a, b), (a, c)]
    assert void_by("a", 7, lineages) is None
    assert void_by("a", 8, lineages) == b
    assert void_by("b", 99, lineages) is None
    assert void_by("a", 8, [(a,)]) is None
    assert void_by("a", 10, [(a, c, b)]) == b
