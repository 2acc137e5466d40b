"""`--sync auto` continues with what is predicted, and tries little else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.comm.communicator import Communicator
from paceline.config.world import SyncConfig
from paceline.errors import Message
from paceline.recorder import NullRecorder
from paceline.run.autotune.autotuner import (
    MIN_RUN_STEPS_PER_TIMED_STEP,
    TIMED,
    UNTIMED,
    WARMUP,
    Autotuner,
    TrialSetting,
)
from paceline.run.autotune.shortlist import SHORTLIST, shortlist, unpredicted
from paceline.run.autotune.trials import steps_of_trials
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.processes.worlds import run_of, world_of

CPU = torch.device("cpu")


def candidates_named(*names: str) -> list[SyncConfig]:
    """Make candidates such as `notified:16x4`."""
    found = []
    for name in names:
        sync, _, size = name.partition(":")
        mb, _, connections = size.partition("x")
        found.append(
            SyncConfig(sync=sync, bucket_mb=float(mb), connections=int(connections or 0))  # type: ignore[arg-type]
        )
    return found


@pytest.mark.parametrize(
    ("names", "seconds", "listed"),
    [
        (["notified:16", "allreduce:8", "notified:4"], [1.1, 1.05, 1.0], [2, 1, 0]),
        (["notified:16", "allreduce:8", "notified:4"], [1.1, 1.5, 1.0], [2, 0]),
        (["notified:16", "allreduce:8", "notified:4"], [1.2, 1.5, 1.0], [2, 0]),
        (["notified:16", "allreduce:8", "notified:4"], [1.0, 1.0, 1.0], [0, 1, 2]),
        (
            ["notified:16", "notified:4", "notified:16x4", "notified:4x4"],
            [1.1, 1, 1.1, 1],
            [1, 3, 0],
        ),
        (["notified:16", "notified:4"], [2.0, 1.0], [1, 0]),
        (
            ["notified:16", "allreduce:8", "notified:4", "notified:16x4", "notified:4x4"],
            [1.1, 1.05, 1.0, 1.1, 1.0],
            [2, 4, 1, 0],
        ),
        (
            ["notified:16", "allreduce:8", "notified:4", "notified:16x4", "notified:4x4"],
            [1.1, 1.0, 1.05, 1.1, 1.05],
            [1, 2, 4, 0],
        ),
    ],
)
def test_a_shortlist_has_the_fastest_and_what_its_prediction_does_not_know(
    names: list[str], seconds: list[float], listed: list[int]
) -> None:
    assert shortlist(candidates_named(*names), seconds) == listed
    assert len(listed) <= SHORTLIST


def test_without_predictions_several_connections_are_tried_with_one_size() -> None:
    names = ["notified:16", "allreduce:8", "notified:4", "notified:16x4", "notified:4x4"]
    assert unpredicted(candidates_named(*names)) == [0, 1, 2, 3]


class FixedPredictor:
    """Predictor that says what it is given, after it has seen the steps that it is to see."""

    note: Message | None = None

    def __init__(self, seconds: Sequence[float] | None) -> None:
        self.seconds, self.begun, self.restarts = seconds, 0, 0

    def begin_step(self) -> None:
        self.begun += 1

    def predict(self) -> list[float] | None:
        return None if self.seconds is None else list(self.seconds)

    def restart(self) -> None:
        self.restarts += 1


class Events(NullRecorder):
    """Recorder of the events `predicted`, and of the notes."""

    def __init__(self) -> None:
        self.predicted: list[dict[str, Any]] = []
        self.notes: list[Any] = []

    def event(self, name: str, **fields: object) -> None:
        if name == "predicted":
            self.predicted.append(fields)
        elif name == "note":
            self.notes.append(fields["text"])


NAMES = ["notified:16", "allreduce:8", "notified:4", "notified:2"]


def exchanges_of_steps(
    seconds: Sequence[float] | None,
    steps: int,
    of_run: int | None,
    notes: list[str] | None = None,
    folder: Path | None = None,
    *,
    names: Sequence[str] = NAMES,
    second_generation: int | None = None,
    events: Events | None = None,
) -> list[SyncConfig]:
    """Return with which exchange each of so many steps runs, and note what is reported.

    Args:
        seconds: predicted for each candidate; None: nothing can be predicted.
        steps: to run.
        of_run: the length of the run; None: unknown.
        notes: gets what is reported.
        folder: the run's folder.
        names: of the candidates.
        second_generation: the step with which it begins; None: there is one generation.
        events: gets rank 0's.
    """
    first = events or Events()

    def on_rank(communicator: Communicator) -> list[SyncConfig]:
        predictor = FixedPredictor(seconds)
        recorder = first if communicator.rank == 0 else Events()
        run = run_of(communicator, world_of((1, 1), communicator.rank), recorder)
        setting = TrialSetting(folder=folder, steps=of_run)
        tuner = Autotuner(candidates_named(*names), run, setting, predictor)
        now, found = tuner.begin_generation(), []
        for step in range(steps):
            if step == second_generation:
                now, predictor.begun = tuner.begin_generation(), 0
            now = tuner.next() or now
            found.append(now)
        assert predictor.begun in (0, TIMED + 1)
        return found

    one, other = run_ranks(2, on_rank)
    assert one == other
    if notes is not None:
        notes += first.notes
    return one


def test_a_run_continues_with_what_is_predicted_and_tries_little_else() -> None:
    candidates, first = candidates_named(*NAMES), UNTIMED + TIMED
    trials = steps_of_trials(2)
    found = exchanges_of_steps([1.2, 1.05, 1.0, 1.2], first + WARMUP + trials + 1, None)
    assert found[:first] == [candidates[1]] * first
    assert found[first : first + WARMUP] == [candidates[2]] * WARMUP
    tried = found[first + WARMUP : first + WARMUP + trials]
    assert {c.bucket_mb for c in tried} == {4, 8}
    assert found[-1] in (candidates[1], candidates[2])


def test_where_the_length_is_known_trials_follow_the_prediction_at_once() -> None:
    first, trials = UNTIMED + TIMED, steps_of_trials(2)
    found = exchanges_of_steps([1.2, 1.05, 1.0, 1.2], first + trials, 10**6)
    assert found[first].bucket_mb == 4
    assert {c.bucket_mb for c in found[first:]} == {4, 8}


def test_what_cannot_be_predicted_is_tried_altogether() -> None:
    first, trials = UNTIMED + TIMED, steps_of_trials(4)
    found = exchanges_of_steps(None, first + trials, 10**6)
    assert {(c.sync, c.bucket_mb) for c in found[first:]} == {
        (c.sync, c.bucket_mb) for c in candidates_named(*NAMES)
    }


def test_a_short_run_continues_with_what_is_predicted_without_trials(tmp_path: Path) -> None:
    candidates, first = candidates_named(*NAMES), UNTIMED + TIMED
    length = MIN_RUN_STEPS_PER_TIMED_STEP * first
    notes: list[str] = []
    found = exchanges_of_steps([1.2, 1.06, 1.0, 1.2], 2 * first, length, notes, tmp_path)
    assert found == [candidates[1]] * first + [candidates[2]] * first
    assert notes == [
        "exchange: notified, 4 MB buckets: predicted 1000 ms per step; allreduce 8 MB 1060. Pin "
        "this choice with --sync notified --bucket_mb 4."
    ]
    notes.clear()
    again = exchanges_of_steps(
        None, first, length - first, notes, tmp_path
    )  # what a resumed run continues with
    assert again == [candidates[2]] * first
    assert notes == [
        "exchange: notified, 4 MB buckets, reused from this run's earlier start (exchange.toml)."
    ]


@pytest.mark.parametrize(
    ("seconds", "steps_fewer", "reason"),
    [
        (
            [1.0, 1.04, 1.2, 1.2],
            0,
            "predicted 1040 ms per step; notified 16 MB 1000 (a gain below 5% is not used). "
            "Pin this choice with --sync allreduce --bucket_mb 8",
        ),
        (
            None,
            0,
            "no step times predicted (a part is compiled, a forward follows the backward of each "
            "step, or other parameters are trained than before); set --sync and --bucket_mb to "
            "override",
        ),
        (
            [1.0, 2.0, 1.0, 1.0],
            1,
            "159 steps are too few for autotuning; set --sync and --bucket_mb to override",
        ),
    ],
    ids=["a small gain", "no prediction", "a very short run"],
)
def test_a_short_run_changes_only_for_a_predicted_gain(
    seconds: list[float] | None, steps_fewer: int, reason: str
) -> None:
    first = UNTIMED + TIMED
    notes: list[str] = []
    found = exchanges_of_steps(
        seconds, 2 * first, MIN_RUN_STEPS_PER_TIMED_STEP * first - steps_fewer, notes
    )
    assert found == [candidates_named(*NAMES)[1]] * 2 * first
    assert notes == [f"exchange: allreduce, 8 MB buckets: {reason}."]


@pytest.mark.parametrize(
    ("names", "seconds", "trials"),
    [
        (NAMES[:2], [1.0, 1.2], 2),
        (NAMES, [1.0, 1.1, 1.0, 1.0], SHORTLIST),
        (NAMES, None, len(NAMES)),
    ],
    ids=["two", "several", "not predicted"],
)
@pytest.mark.parametrize("steps_fewer", [0, 1])
def test_a_run_has_trials_if_they_take_at_most_a_tenth_of_its_steps(
    names: list[str], seconds: list[float] | None, trials: int, steps_fewer: int
) -> None:
    length, first = 10 * steps_of_trials(trials), UNTIMED + TIMED
    found = exchanges_of_steps(
        seconds, first + steps_of_trials(trials), length - steps_fewer, names=names
    )
    assert len(set(found[first:])) == (1 if steps_fewer else trials)


@pytest.mark.parametrize(
    ("seconds", "of_run", "fastest"),
    [
        ([1.2, 1.05, 1.0, 1.2], None, "notified 4 MB"),
        ([1.2, 1.0, 1.1, 1.2], 200, "allreduce 8 MB"),
        ([1.2, 1.03, 1.0, 1.2], 200, "allreduce 8 MB"),
        ([1.2, 2.0, 1.1, 1.0000004], 200, "notified 2 MB"),
    ],
)
def test_an_event_names_what_is_predicted_and_what_the_run_continues_with(
    seconds: list[float], of_run: int | None, fastest: str
) -> None:
    events, first = Events(), UNTIMED + TIMED
    found = exchanges_of_steps(seconds, first + 1, of_run, events=events)
    (event,) = events.predicted
    names = ["notified 16 MB", "allreduce 8 MB", "notified 4 MB", "notified 2 MB"]
    assert event == {
        "exchange": fastest,
        "milliseconds": {
            name: round(1000 * one, 3) for name, one in zip(names, seconds, strict=True)
        },
    }
    assert f"{found[first].sync} {found[first].bucket_mb:g} MB" == fastest


@pytest.mark.parametrize("before", [5, 60, WARMUP + UNTIMED + TIMED + 3])
def test_a_generation_predicts_again_and_begins_the_trials_when_they_were_due(before: int) -> None:
    candidates, first = candidates_named(*NAMES), UNTIMED + TIMED
    due = max(first + WARMUP, before + first)
    found = exchanges_of_steps(
        [1.2, 1.05, 1.0, 1.2], due + steps_of_trials(2), None, second_generation=before
    )
    assert found[before : before + first] == [candidates[1]] * first
    assert found[before + first : due] == [candidates[2]] * (due - before - first)
    assert set(found[due:]) == {candidates[1], candidates[2]}


def test_a_short_run_says_what_it_would_have_without_the_prediction() -> None:
    notes: list[str] = []
    exchanges_of_steps([1.0, 2.0, 1.05, 1.08], 2 * (UNTIMED + TIMED), 200, notes)
    assert notes == [
        "exchange: notified, 16 MB buckets: predicted 1000 ms per step; notified 4 MB 1050, "
        "notified 2 MB 1080, allreduce 8 MB 2000. Pin this choice with --sync notified "
        "--bucket_mb 16."
    ]
