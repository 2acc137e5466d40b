"""What the ledger says of runs that went well, were killed, moved, or were tampered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError
from paceline.observe.event_file import read_events
from paceline.observe.ledger import Proof, prove
from tests.harness.processes.ledger_histories import RunHistory


def proof_of(history: RunHistory, folder: Path) -> Proof:
    return prove((rank, read_events(path)) for rank, path in history.write(folder))


def words(proof: Proof) -> str:
    return "\n".join(fault.text for fault in proof.faults)


def edit(history: RunHistory, rank: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Let `change` look at each event of a rank's files and change it; False removes it."""
    for (_, number), lines in history.files.items():
        if number == rank:
            events = [json.loads(line) for line in lines]
            kept = [event for event in events if change(event) is not False]
            lines[:] = [json.dumps(event) + "\n" for event in kept]


def two_ranks(end_step: int = 6, **more: Any) -> RunHistory:
    """Two epochs of ten samples in steps of 4, 4 and 2: rank 0 has 2, 2, 1 of them."""
    history = RunHistory(samples=10, batch=4, epochs=2)
    history.start(world=2, start_step=0, end_steps=[end_step, end_step], **more)
    return history


def test_a_run_that_ended_has_every_sample_once(tmp_path: Path) -> None:
    proof = proof_of(two_ranks(ended=True), tmp_path)
    assert proof.exact
    assert (proof.done, proof.committed, proof.begun) == (6, 6, 6)
    assert [(a.owed, a.committed, a.once, a.lost, a.twice) for a in proof.accounts] == [
        (10, 10, 10, 0, 0),
        (10, 10, 10, 0, 0),
    ]


def test_a_run_that_is_under_way_is_exact_as_far_as_all_ranks_went(tmp_path: Path) -> None:
    history = RunHistory(samples=10, batch=4, epochs=2)
    history.start(world=2, start_step=0, end_steps=[5, 4], saved=[3])
    proof = proof_of(history, tmp_path)
    assert proof.exact
    assert (proof.committed, proof.done, proof.begun) == (3, 4, 5)
    assert [(a.owed, a.committed, a.once) for a in proof.accounts] == [(10, 10, 10), (4, 0, 4)]


def test_steps_behind_the_checkpoint_are_void_once_the_run_went_on_from_it(tmp_path: Path) -> None:
    history = RunHistory(samples=10, batch=4, epochs=2)
    history.start(world=3, start_step=0, end_steps=[5, 5, 6], saved=[2])
    history.kill(torn=[0, 2])
    history.start(world=2, start_step=2, end_steps=[6, 6], ended=True)
    proof = proof_of(history, tmp_path)
    assert proof.exact
    assert proof.starts == 2
    assert [a.once for a in proof.accounts] == [10, 10]


def test_a_generation_answers_for_its_steps_though_they_go_on_like_the_last_ones(
    tmp_path: Path,
) -> None:
    history = RunHistory(samples=40, batch=4, epochs=1)
    history.start(world=2, start_step=0, end_steps=[3, 3], saved=[3])
    history.start(world=2, start_step=3, end_steps=[10, 10], ended=True)
    assert proof_of(history, tmp_path).exact
    edit(history, 1, lambda event: (event["event"], event.get("step")) != ("step", 5))
    (fault,) = proof_of(history, tmp_path).faults
    assert fault.generation == 1


def test_a_step_before_the_one_where_its_generation_went_on_is_a_fault(tmp_path: Path) -> None:
    history = two_ranks(end_step=3, saved=[3])
    history.start(world=1, start_step=3, end_steps=[6], ended=True)
    step = next(line for line in history.files[0, 0] if '"step": 2' in line and '"first"' in line)
    history.files[0, 0].append(step.replace('"generation": 0', '"generation": 1'))
    sentence = "Rank 0 recorded step 2, but this generation could only train step 3 to 5"
    assert sentence in words(proof_of(history, tmp_path))


def test_samples_that_cannot_be_read_are_told_apart(tmp_path: Path) -> None:
    history = RunHistory(samples=10, batch=4, epochs=2, broken=frozenset({1, 9}))
    history.start(world=2, start_step=0, end_steps=[6, 6], ended=True)
    proof = proof_of(history, tmp_path)
    assert proof.exact
    assert [(a.owed, a.once, a.skipped) for a in proof.accounts] == [(10, 8, 2), (10, 8, 2)]


def test_steps_that_came_with_another_runs_checkpoint_are_not_this_runs(tmp_path: Path) -> None:
    history = RunHistory(samples=10, batch=4, epochs=2)
    history.start(world=1, start_step=4, end_steps=[5], origin="other.pt")
    history.start(world=2, start_step=4, end_steps=[6, 6], origin="other.pt", ended=True)
    proof = proof_of(history, tmp_path)
    assert proof.exact
    assert proof.base == 4
    assert [(a.epoch, a.owed, a.once) for a in proof.accounts] == [(1, 6, 6)]


def test_a_run_that_goes_on_at_a_step_nobody_trained_has_lost_those_before(tmp_path: Path) -> None:
    history = RunHistory(samples=10, batch=4, epochs=2)
    history.start(world=1, start_step=4, end_steps=[6], ended=True)
    proof = proof_of(history, tmp_path)
    assert [a.lost for a in proof.accounts] == [10, 4]


def test_a_missing_line_is_lost_samples_with_their_place(tmp_path: Path) -> None:
    history = two_ranks(ended=True)
    edit(history, 1, lambda event: (event["event"], event.get("step")) != ("step", 4))
    proof = proof_of(history, tmp_path)
    assert [a.lost for a in proof.accounts] == [0, 2]
    (fault,) = proof.faults
    assert (fault.generation, fault.step, fault.steps) == (0, 4, 1)
    assert fault.text == "Positions 6 to 7 were trained by no rank (rank 1 wrote no line)."


def test_a_missing_line_of_a_step_under_way_is_a_hole_if_later_ones_are_there(
    tmp_path: Path,
) -> None:
    history = RunHistory(samples=40, batch=4, epochs=2)
    history.start(world=3, start_step=0, end_steps=[4, 2, 4])
    assert proof_of(history, tmp_path).exact
    edit(history, 2, lambda event: (event["event"], event.get("step")) != ("step", 2))
    proof = proof_of(history, tmp_path)
    assert words(proof) == "Rank 2 wrote no line for these steps, but lines for later ones."


def test_a_repeated_line_is_samples_twice(tmp_path: Path) -> None:
    history = two_ranks(ended=True)
    lines = history.files[0, 0]
    lines.insert(6, next(line for line in lines if '"step": 1' in line and '"first"' in line))
    proof = proof_of(history, tmp_path)
    assert [(a.once, a.lost, a.twice) for a in proof.accounts] == [(8, 0, 2), (10, 0, 0)]
    assert words(proof) == "Positions 4 to 5 were trained twice, by rank 0."


def test_a_share_outside_of_its_batch_is_out_of_place(tmp_path: Path) -> None:
    history = two_ranks(ended=True)

    def shift(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 1:
            event["first"], event["last"] = event["first"] + 1, event["last"] + 1

    edit(history, 1, shift)
    proof = proof_of(history, tmp_path)
    assert [(a.once, a.lost, a.twice) for a in proof.accounts] == [(9, 1, 1), (10, 0, 0)]
    assert "Position 6 was trained by no rank." in words(proof)
    assert "Position 8 was trained outside of the batch, 4 to 7, by rank 1" in words(proof)


def test_the_same_fault_in_many_steps_is_told_once_and_counted_in_all(tmp_path: Path) -> None:
    history = RunHistory(samples=400, batch=4, epochs=2)
    history.start(world=2, start_step=0, end_steps=[200, 200], ended=True)
    edit(history, 1, lambda event: event["event"] != "step")
    proof = proof_of(history, tmp_path)
    assert [a.lost for a in proof.accounts] == [200, 200]
    assert proof.faults[0].steps == 99


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    history = two_ranks(end_step=3)
    del history.files[0, 1]
    proof = proof_of(history, tmp_path)
    assert not proof.exact
    assert (
        words(proof)
        == "It has 2 ranks, but no event file of rank 1: give the run's folder of each machine."
    )


def test_a_rank_that_no_longer_writes_is_not_missed(tmp_path: Path) -> None:
    history = two_ranks(end_step=3, saved=[3])
    history.start(world=1, start_step=3, end_steps=[6], ended=True)
    assert proof_of(history, tmp_path).exact


def test_a_generation_that_ended_before_its_first_line_changes_nothing(tmp_path: Path) -> None:
    history = two_ranks(end_step=3, saved=[3])
    history.start(world=4, start_step=3, end_steps=[3, 3, 3, 3])
    for rank in range(4):
        edit(history, rank, lambda event: event.get("generation") != 1 or event["event"] == "run")
    history.start(world=1, start_step=3, end_steps=[6], ended=True)
    assert proof_of(history, tmp_path).exact


def test_a_run_that_came_to_no_step_is_exact(tmp_path: Path) -> None:
    proof = proof_of(two_ranks(end_step=0), tmp_path)
    assert proof.exact
    assert (proof.done, proof.accounts) == (0, ())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda e: e.update(world_size=3) if e["event"] == "run" else None,
            "different world sizes",
        ),
        (lambda e: e.update(step=1) if e["event"] == "restore" else None, "at different steps"),
        (lambda e: e.update(epoch=1) if e.get("step") == 1 else None, "another epoch: 1"),
        (lambda e: e.update(skipped=3) if e.get("step") == 1 else None, "skipped 3 of 2 samples"),
        (lambda e: e.update(step=99) if e.get("step") == 5 else None, "only train step 0 to 5"),
        (lambda e: e.update(last=0) if e.get("step") == 1 else None, "by no rank"),
    ],
)
def test_lines_that_contradict_each_other_are_faults(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], sentence: str
) -> None:
    history = two_ranks(ended=True)
    edit(history, 1, lambda event: change(event) is not False)
    proof = proof_of(history, tmp_path)
    assert not proof.exact
    assert sentence in words(proof)


@pytest.mark.parametrize("kind", ["run", "restore"])
def test_a_generation_that_never_says_what_it_is_is_a_fault(tmp_path: Path, kind: str) -> None:
    history = RunHistory(samples=10, batch=4, epochs=2)
    history.start(world=1, start_step=0, end_steps=[3], saved=[3])
    history.start(world=1, start_step=3, end_steps=[6], ended=True)
    edit(history, 0, lambda event: (event["event"], event.get("generation")) != (kind, 1))
    assert "No line records " in words(proof_of(history, tmp_path))


@pytest.mark.parametrize("value", [None, "7", 1.5, [1]])
@pytest.mark.parametrize("name", ["step", "first", "skipped", "generation"])
def test_a_field_that_is_no_whole_number_is_named_with_its_line(
    tmp_path: Path, name: str, value: object
) -> None:
    history = two_ranks()
    edit(history, 1, lambda e: e.update({name: value}) if e["event"] == "step" else None)
    with pytest.raises(DataError, match=r"Event 4 of rank 1, .* can't be used"):
        proof_of(history, tmp_path)


def test_a_field_that_is_missing_is_named(tmp_path: Path) -> None:
    history = two_ranks()
    edit(history, 1, lambda event: event.pop("last", None))
    with pytest.raises(DataError, match=r"Event 4 of rank 1, .* can't be used \('last' is missing"):
        proof_of(history, tmp_path)


def test_the_files_of_two_runs_are_not_added_up(tmp_path: Path) -> None:
    one, other = two_ranks(), RunHistory(samples=12, batch=4, epochs=2)
    other.start(world=2, start_step=0, end_steps=[3, 3])
    files = one.write(tmp_path / "one") + other.write(tmp_path / "other")
    with pytest.raises(DataError, match="folders of one run only"):
        prove((rank, read_events(path)) for rank, path in files)
    files = one.write(tmp_path / "one") + one.write(tmp_path / "copy")
    with pytest.raises(DataError, match=r"Rank 0 started generation 0 twice"):
        prove((rank, read_events(path)) for rank, path in files)


def test_files_that_end_before_a_run_began_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No rank has written the start of a run"):
        prove([(0, [])])
