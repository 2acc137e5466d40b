"""What the ledger says of runs that went well, were killed, moved, or were tampered with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError
from paceline.observe.event_file import read_events
from paceline.observe.ledger import Proof, prove
from paceline.observe.ledger.reading import History
from tests.harness.processes.ledger_histories import RunHistory


def proof_of(history: RunHistory, folder: Path) -> Proof:
    return prove((member, read_events(path)) for member, path in history.write(folder))


def words(proof: Proof) -> str:
    return "\n".join(fault.text for fault in proof.faults)


def edit(history: RunHistory, member: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Let `change` look at each event of a member's files and change it; False removes it."""
    for (_, number, _), lines in history.files.items():
        if number == member:
            events = [json.loads(line) for line in lines]
            kept = [event for event in events if change(event) is not False]
            lines[:] = [json.dumps(event) + "\n" for event in kept]


FIRST, SECOND, THIRD = (f"member 000000000000-{number}" for number in range(3))


def two_ranks(end_step: int = 6, *, by_member: bool = True, **more: Any) -> RunHistory:
    """Two epochs of ten samples in steps of 4, 4 and 2: rank 0 has 2, 2, 1 of them."""
    history = RunHistory(samples=10, batch=4, epochs=2, by_member=by_member)
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
    step = next(line for line in history.lines() if '"step": 2' in line and '"first"' in line)
    history.lines().append(step.replace('"generation": 0', '"generation": 1'))
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


@pytest.mark.parametrize("by_member", [False, True])
def test_a_missing_line_is_lost_samples_with_their_place(tmp_path: Path, by_member: bool) -> None:
    """Though the other member's line has the share: this one trained something else."""
    history = two_ranks(ended=True, by_member=by_member)
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
    lines = history.lines()
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
    history = RunHistory(samples=400, batch=4, epochs=2, by_member=False)
    history.start(world=2, start_step=0, end_steps=[200, 200], ended=True)
    edit(history, 1, lambda event: event["event"] != "step")
    proof = proof_of(history, tmp_path)
    assert [a.lost for a in proof.accounts] == [200, 200]
    assert proof.faults[0].steps == 99


def test_a_missing_file_of_an_earlier_version_is_a_fault(tmp_path: Path) -> None:
    history = two_ranks(end_step=3, by_member=False)
    history.lose(1, -1)
    proof = proof_of(history, tmp_path)
    assert not proof.exact
    assert proof.notes == ()
    assert (
        words(proof)
        == "It has 2 ranks, but no event file of rank 1: give the run's folder of each machine."
    )


@pytest.mark.parametrize("lost", [0, 1])
def test_one_members_file_proves_a_run_that_ended(tmp_path: Path, lost: int) -> None:
    history = two_ranks(ended=True)
    history.lose(lost)
    proof = proof_of(history, tmp_path)
    assert proof.exact
    assert (proof.done, proof.committed) == (6, 6)
    assert [(a.owed, a.once, a.substituted) for a in proof.accounts] == [(10, 10, 5), (10, 10, 5)]
    assert proof.notes == (
        f"Generation 0 has no event file of {(FIRST, SECOND)[lost]}: other members' lines prove 10 "
        "samples, skipped ones included; give the run's folder of each machine.",
    )


def test_lines_that_a_machine_lost_are_proved_by_the_others(tmp_path: Path) -> None:
    history = two_ranks(end_step=5, saved=[4])
    history.lines(1)[-2:] = ['{"event": "step", "gener']  # of steps 3 and 4
    proof = proof_of(history, tmp_path)
    assert proof.exact
    assert (proof.committed, proof.done, proof.begun) == (4, 4, 5)
    assert [(a.once, a.substituted) for a in proof.accounts] == [(10, 0), (4, 2)]
    assert proof.notes == (
        f"Generation 0 has no last lines of {SECOND}: other members' lines prove 2 samples, "
        "skipped ones included.",
    )


def test_what_others_tell_of_steps_under_way_proves_nothing(tmp_path: Path) -> None:
    history = two_ranks(end_step=3)
    history.lose(1)
    proof = proof_of(history, tmp_path)
    assert proof.exact
    assert (proof.committed, proof.done, proof.begun) == (0, 0, 3)
    assert "no event file" in proof.notes[0]
    assert SECOND in proof.notes[0]


def test_a_dead_members_steps_are_proved_where_its_rank_passed_to_another(tmp_path: Path) -> None:
    history = RunHistory(samples=10, batch=4, epochs=2)
    history.start(world=3, start_step=0, end_steps=[5, 4, 5], saved=[4])
    history.start(world=2, start_step=4, end_steps=[6, 6], ended=True, members=[0, 2])
    proof = proof_of(history, tmp_path)
    assert proof.exact
    assert proof.notes == ()
    assert [(a.once, a.substituted) for a in proof.accounts] == [(10, 0), (10, 0)]
    history.lose(1)
    proof = proof_of(history, tmp_path)
    assert proof.exact
    assert [(a.once, a.substituted) for a in proof.accounts] == [(10, 3), (10, 1)]
    assert [SECOND in note for note in proof.notes] == [True]


def test_lost_samples_are_not_those_of_a_member_whose_file_is_lost(tmp_path: Path) -> None:
    history = RunHistory(samples=12, batch=6, epochs=2)
    history.start(world=3, start_step=0, end_steps=[4, 4, 4], ended=True)
    history.lose(1)
    edit(history, 2, lambda event: (event["event"], event.get("step")) != ("step", 1))
    proof = proof_of(history, tmp_path)
    assert words(proof) == "Positions 10 to 11 were trained by no rank (rank 2 wrote no line)."


def test_a_member_that_went_on_has_lost_no_last_lines(tmp_path: Path) -> None:
    history = RunHistory(samples=10, batch=4, epochs=2)
    history.start(world=2, start_step=0, end_steps=[4, 4], saved=[4])
    history.start(world=2, start_step=4, end_steps=[6, 6], ended=True, members=[0, 1])
    assert proof_of(history, tmp_path).exact
    edit(history, 1, lambda event: (event["event"], event.get("step")) != ("step", 3))
    proof = proof_of(history, tmp_path)
    assert words(proof) == "Positions 2 to 3 were trained by no rank (rank 1 wrote no line)."


def test_members_that_tell_different_shares_are_both_named(tmp_path: Path) -> None:
    history = RunHistory(samples=12, batch=6, epochs=2)
    history.start(world=3, start_step=0, end_steps=[4, 4, 4], ended=True)
    history.lose(1)

    def move(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 1:
            event["cuts"] = [6, 8, 11, 12]

    edit(history, 2, move)
    proof = proof_of(history, tmp_path)
    assert [(fault.step, fault.text) for fault in proof.faults] == [
        (1, "Positions 8 to 9 were trained by no rank (rank 1 wrote no line)."),
        (1, f"The share of rank 1 is [8, 10) in the file of {FIRST}, but [8, 11) in the file of "
            f"{THIRD}."),
    ]  # fmt: skip


def test_a_member_that_trained_another_share_than_the_others_tell_is_named(tmp_path: Path) -> None:
    history = two_ranks()

    def shorten(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 5:
            event["last"], event["cuts"] = event["first"], [*event["cuts"][:-1], event["first"]]

    edit(history, 1, shorten)
    proof = proof_of(history, tmp_path)
    assert f"is [9, 9) in the file of {SECOND}, but [9, 10) in the file of {FIRST}" in words(proof)


def test_members_of_different_worlds_are_told_apart(tmp_path: Path) -> None:
    history = two_ranks(ended=True)

    def rename(event: dict[str, Any]) -> None:
        if event["event"] == "run":
            event["members"][0] = "a-0"

    edit(history, 1, rename)
    assert "Its ranks recorded different members." in words(proof_of(history, tmp_path))


def test_a_run_that_an_earlier_version_began_is_proved_over_both_kinds_of_files(
    tmp_path: Path,
) -> None:
    history = two_ranks(end_step=4, by_member=False, saved=[3])
    history.kill(torn=[0, 1])
    history.by_member = True
    history.start(world=3, start_step=3, end_steps=[6, 6, 6], ended=True)
    proof = proof_of(history, tmp_path)
    assert proof.exact
    assert [a.once for a in proof.accounts] == [10, 10]
    history.lose(1, -1)
    assert "no event file of rank 1" in words(proof_of(history, tmp_path / "without"))


def test_memory_grows_with_changes_and_not_with_steps() -> None:
    def lines(steps: int) -> Iterator[dict[str, Any]]:
        size = {"samples": 4 * steps, "steps": steps, "epochs": 1, "batch": 4}
        start = {"rank": 0, "world_size": 2, "members": ["a-0", "a-1"]}
        yield {"event": "run", "generation": 0, **size, **start}
        for step in range(steps):
            place = {"step": step, "epoch": 0, "first": 4 * step, "last": 4 * step + 2}
            cuts = [4 * step, 4 * step + 2, 4 * step + 4]
            yield {"event": "step", "generation": 0, **place, "cuts": cuts, "skipped": 0}

    (stretch,) = History([("member a-0", lines(1000))]).generations["#0"].stretches
    assert (stretch.start, stretch.end, stretch.cuts) == (0, 1000, (0, 2, 4))


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
    history = two_ranks(ended=True, by_member=False)
    edit(history, 1, lambda event: change(event) is not False)
    proof = proof_of(history, tmp_path)
    assert not proof.exact
    assert sentence in words(proof)


@pytest.mark.parametrize("kind", ["run", "restore"])
def test_a_generation_that_never_says_what_it_is_is_a_fault(tmp_path: Path, kind: str) -> None:
    history = RunHistory(samples=10, batch=4, epochs=2, by_member=False)
    history.start(world=1, start_step=0, end_steps=[3], saved=[3])
    history.start(world=1, start_step=3, end_steps=[6], ended=True)
    edit(history, 0, lambda event: (event["event"], event.get("generation")) != (kind, 1))
    assert "No line records " in words(proof_of(history, tmp_path))


def test_a_member_that_begins_without_the_start_of_a_run_is_named(tmp_path: Path) -> None:
    history = two_ranks()
    edit(history, 1, lambda event: event["event"] != "run")
    with pytest.raises(DataError, match=rf"Event 3 of {SECOND}, .*a step before the start of a r"):
        proof_of(history, tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"rank": 0}, {"rank": 2}, {"rank": -1}, {"world_size": 3}, {"members": ["a-0", "a-1"]}],
)
def test_a_start_that_is_not_the_members_own_is_named(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    history = two_ranks()
    edit(history, 1, lambda event: event.update(change) if event["event"] == "run" else None)
    with pytest.raises(DataError, match=rf"Event 1 of {SECOND}, .* isn't rank -?\d of these mem"):
        proof_of(history, tmp_path)


@pytest.mark.parametrize("value", [None, "7", 1.5, [1], [0, 2], [0, 2.0, 4], [0, 1, 2, 4]])
def test_cuts_that_are_no_cuts_are_named_with_their_line(tmp_path: Path, value: object) -> None:
    history = two_ranks()
    edit(history, 1, lambda e: e.update(cuts=value) if e.get("step") == 0 and "cuts" in e else None)
    with pytest.raises(DataError, match=rf"Event 4 of {SECOND}, .* can't be used"):
        proof_of(history, tmp_path)


@pytest.mark.parametrize("value", [None, "7", 1.5, [1]])
@pytest.mark.parametrize("name", ["step", "first", "skipped", "generation"])
def test_a_field_that_is_no_whole_number_is_named_with_its_line(
    tmp_path: Path, name: str, value: object
) -> None:
    history = two_ranks()
    edit(history, 1, lambda e: e.update({name: value}) if e["event"] == "step" else None)
    with pytest.raises(DataError, match=rf"Event 4 of {SECOND}, .* can't be used"):
        proof_of(history, tmp_path)


def test_a_field_that_is_missing_is_named(tmp_path: Path) -> None:
    history = two_ranks()
    edit(history, 1, lambda event: event.pop("last", None))
    with pytest.raises(DataError, match=rf"Event 4 of {SECOND}, .* used \('last' is missing"):
        proof_of(history, tmp_path)


def test_the_files_of_two_runs_are_not_added_up(tmp_path: Path) -> None:
    one, other = two_ranks(), RunHistory(samples=12, batch=4, epochs=2)
    other.start(world=2, start_step=0, end_steps=[3, 3])
    files = one.write(tmp_path / "one") + other.write(tmp_path / "other")
    with pytest.raises(DataError, match="folders of one run only"):
        prove((member, read_events(path)) for member, path in files)
    files = one.write(tmp_path / "one") + one.write(tmp_path / "copy")
    with pytest.raises(DataError, match=r"Rank 0 started generation 0 twice"):
        prove((member, read_events(path)) for member, path in files)


def test_a_prolonged_run_is_one_run_that_is_exact(tmp_path: Path) -> None:
    """As in https://github.com/MIC-DKFZ/nnDetection/issues/247."""
    history = RunHistory(samples=10, batch=4, epochs=1)
    history.start(world=2, start_step=0, end_steps=[3, 3], saved=[3], ended=True)
    history.epochs = 3
    history.start(world=2, start_step=3, end_steps=[3, 3])
    proof = proof_of(history, tmp_path / "begun")
    assert proof.exact
    assert (proof.committed, proof.extent.epochs, len(proof.accounts)) == (3, 3, 1)
    history.start(world=1, start_step=3, end_steps=[9], ended=True)
    proof = proof_of(history, tmp_path / "ended")
    assert proof.exact
    assert [account.once for account in proof.accounts] == [10, 10, 10]


def test_a_run_of_other_batches_is_another_run_in_words(tmp_path: Path) -> None:
    history = RunHistory(samples=10, batch=4, epochs=1)
    history.start(world=2, start_step=0, end_steps=[3, 3], saved=[3], ended=True)
    history.batch = 5
    history.start(world=2, start_step=3, end_steps=[4, 4])
    recorded = r"10 samples and 2 steps in each of 1 epoch, with 5 samples a step in generation 1"
    with pytest.raises(DataError, match=f"Rank 0 recorded {recorded}, but .*: give the folders"):
        proof_of(history, tmp_path)


def test_files_that_end_before_a_run_began_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No rank has written the start of a run"):
        prove([(FIRST, [])])
