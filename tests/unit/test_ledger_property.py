"""Random runs are proved exact, and a single line that is tampered with is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.observe.event_file import read_events
from paceline.observe.ledger import Proof, prove
from tests.harness.processes.ledger_histories import Key, RunHistory

LAG = 2  # steps that a rank may be ahead of another


@st.composite
def histories(draw: st.DrawFn) -> RunHistory:
    """Runs with random sizes, worlds, kills, and restarts from random checkpoints."""
    history = RunHistory(
        samples=draw(st.integers(1, 40)),
        batch=draw(st.integers(1, 12)),
        epochs=draw(st.integers(1, 3)),
        broken=draw(st.frozensets(st.integers(0, 39), max_size=3)),
    )
    earlier = draw(st.integers(0, 4))  # starts of an earlier version
    for number in range(draw(st.integers(1, 4))):
        history.by_member = number >= earlier
        if start(draw, history):
            break
        history.kill(torn=draw(st.sets(st.integers(0, 3))))
    return history


def start(draw: st.DrawFn, history: RunHistory) -> bool:
    """Start the run once more; tell whether it ended."""
    world = draw(st.integers(1, 4))
    start_step = draw(st.sampled_from(history.saved or [0]))
    all_passed = draw(st.integers(start_step, history.total))
    ahead = draw(st.lists(st.integers(0, LAG), min_size=world, max_size=world))
    ended = all_passed == history.total and draw(st.booleans())
    history.start(
        world=world,
        start_step=start_step,
        end_steps=[min(all_passed + more, history.total) for more in ahead],
        saved=draw(st.sets(st.integers(start_step, all_passed), max_size=3)),
        checkpoint_logged=draw(st.booleans()),
        ended=ended,
        local=draw(st.integers(1, 4)),
    )
    return ended


def proof_of(history: RunHistory) -> Proof:
    with TemporaryDirectory() as folder:
        files = history.write(Path(folder))
        return prove((member, read_events(path)) for member, path in files)


@settings(max_examples=100)
@given(histories())
def test_a_run_is_exact_however_often_it_was_killed_and_with_whom_it_went_on(
    history: RunHistory,
) -> None:
    proof = proof_of(history)
    assert proof.exact, proof.faults
    assert proof.notes == ()
    assert (proof.committed, proof.done) == (history.committed, history.done)
    for account in proof.accounts:
        assert (account.once, account.skipped) == history.counts(account.epoch)
        assert account.lost == account.twice == 0


@settings(max_examples=100)
@given(histories(), st.data())
def test_the_files_of_rank_0_prove_what_they_commit(
    history: RunHistory, data: st.DataObject
) -> None:
    others = sorted(key for key in history.files if key[1] > 0 and key[2] >= 0)
    lost = data.draw(st.sets(st.sampled_from(others)) if others else st.just(set()))
    for key in lost:
        del history.files[key]
    proof = proof_of(history)
    assert proof.exact, proof.faults
    assert proof.committed == history.committed
    for account in proof.accounts:
        steps = range(account.epoch * history.steps, (account.epoch + 1) * history.steps)
        owed = sum(len(history.trained[step]) for step in steps if step < proof.done)
        assert account.once + account.skipped == owed


CHANGES: dict[str, Callable[[dict[str, Any]], list[dict[str, Any]]]] = {
    "removed": lambda e: [],
    "repeated": lambda e: [e, e],
    "shifted": lambda e: [{**e, "first": e["first"] + 1, "last": e["last"] + 1}],
    "begun earlier": lambda e: [{**e, "first": e["first"] - 1}],
    "begun later": lambda e: [{**e, "first": e["first"] + 1, "skipped": 0}],
    "shorter": lambda e: [{**e, "last": e["last"] - 1, "skipped": 0}],
    "longer": lambda e: [{**e, "last": e["last"] + 1}],
    "telling a longer last share": lambda e: [{**e, "cuts": [*e["cuts"][:-1], e["cuts"][-1] + 1]}],
    "telling a longer first share": lambda e: [{**e, "cuts": [e["cuts"][0] - 1, *e["cuts"][1:]]}],
    "telling all shares elsewhere": lambda e: [{**e, "cuts": [cut + 1 for cut in e["cuts"]]}],
    "of another step": lambda e: [{**e, "step": e["step"] + 1}],
    "of another epoch": lambda e: [{**e, "epoch": e["epoch"] + 1}],
    "of another generation": lambda e: [{**e, "generation": e["generation"] + 1}],
}


@settings(max_examples=200)
@given(histories(), st.sampled_from(sorted(CHANGES)), st.data())
def test_one_line_that_is_changed_is_noticed(
    history: RunHistory, change: str, data: st.DataObject
) -> None:
    lines = standing(history)
    assume(lines)
    key, number = data.draw(st.sampled_from(lines))
    event = json.loads(history.files[key][number])
    assume("telling" not in change or "cuts" in event)
    changed = [json.dumps(e) + "\n" for e in CHANGES[change](event)]
    history.files[key][number : number + 1] = changed
    proof = proof_of(history)
    assert not proof.exact or proof.notes


def standing(history: RunHistory) -> list[tuple[Key, int]]:
    """List the lines whose samples count: not void, and not the last ones of a run under way."""
    restores = dict(starts(history))
    found = []
    for key, lines in history.files.items():
        for number, line in enumerate(lines):
            event = json.loads(line) if line.endswith("\n") else {}
            if event.get("event") != "step" or event["first"] == event["last"]:
                continue
            step, generation = event["step"], event["generation"]
            void = any(g > generation and start_step <= step for g, start_step in restores.items())
            last = generation == history.generation and step + 1 == history.end_steps[key[1]]
            if not void and step < history.done and (not last or step < history.committed):
                found.append((key, number))
    return found


def starts(history: RunHistory) -> Iterator[tuple[int, int]]:
    """Yield where each generation went on."""
    for lines in history.files.values():
        for line in lines:
            if line.startswith('{"event": "restore"'):
                event = json.loads(line)
                yield event["generation"], event["step"]
