"""`--sync auto`: what there is to choose from, and what becomes of a choice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.communicator import Communicator
from paceline.config.world import SyncConfig
from paceline.recorder import NullRecorder
from paceline.replica.trained_parameters import TrainedParameters
from paceline.run.autotune import autotuner
from paceline.run.autotune.autotuner import WARMUP, Autotuner, TrialSetting
from paceline.run.autotune.trials import Outcome, steps_of_trials
from paceline.state.exchange_choice import CHOICE_NAME, read_choice
from paceline.wiring.candidates import candidates_of
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.processes.worlds import run_of, world_of

CPU = torch.device("cpu")
TWO = [SyncConfig(sync="notified", bucket_mb=16.0), SyncConfig(sync="allreduce", bucket_mb=8.0)]
NEEDED = steps_of_trials(len(TWO))


def trained(layers: int, megabytes: float) -> TrainedParameters:
    """List a model of layers of some MiB each."""
    model = nn.Sequential(*(nn.Linear(round(megabytes * 2**18), 1) for _ in range(layers)))
    return TrainedParameters.of(model, torch.optim.SGD(model.parameters()))


def names(
    config: SyncConfig,
    trained: TrainedParameters,
    machines: Sequence[int] = (2,),
    device: Any = CPU,
) -> list[str]:
    found = candidates_of(config, trained, machines, device)
    return [
        f"{c.sync}:{c.bucket_mb:g}:{c.wire}{f':x{c.connections}' * bool(c.connections)}"
        for c in found
    ]


def test_a_large_model_has_all_methods_and_sizes_to_choose_from() -> None:
    assert names(SyncConfig(), trained(30, 1)) == [
        *("notified:16:fp32", "allreduce:8:fp32", "notified:8:fp32", "notified:4:fp32"),
        *("notified:2:fp32", "allreduce:25:fp32"),
    ]


def test_sizes_that_make_the_same_buckets_are_one() -> None:
    assert names(SyncConfig(), trained(3, 0.1)) == ["notified:16:fp32", "allreduce:8:fp32"]
    assert names(SyncConfig(), trained(4, 1.5)) == [
        *("notified:16:fp32", "allreduce:8:fp32", "notified:4:fp32", "notified:2:fp32")
    ]


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ({"sync": "allreduce"}, ["allreduce:0:fp32"]),
        ({"sync": "notified", "wire": "int8", "bucket_mb": 3}, ["notified:3:int8"]),
        ({"bucket_mb": 3}, ["notified:3:fp32", "allreduce:3:fp32"]),
        ({"update": "sharded", "bucket_mb": 3}, ["notified:3:fp32"]),
        ({"connections": 3, "bucket_mb": 3}, ["notified:3:fp32:x3"]),
        ({"transport": "nixl", "bucket_mb": 3}, ["notified:3:fp32"]),
        (
            {"wire": "bf16"},
            ["notified:16:bf16", "notified:8:bf16", "notified:4:bf16", "notified:2:bf16"],
        ),
    ],
    ids=str,
)
def test_what_was_asked_for_is_not_chosen_otherwise(asked: dict[str, Any], left: list[str]) -> None:
    assert names(SyncConfig(**asked), trained(30, 1)) == left


def test_several_connections_are_tried_between_machines_unless_their_number_was_told() -> None:
    machines, model = (1, 2), trained(3, 0.1)
    one = ["notified:16:fp32", "allreduce:8:fp32"]
    assert names(SyncConfig(), model, machines) == [*one, "notified:16:fp32:x4"]
    assert names(SyncConfig(wire="int8"), model, machines) == [
        *("notified:16:int8", "notified:16:int8:x4")
    ]
    assert names(SyncConfig(connections=1), model, machines) == [
        *("notified:16:fp32:x1", "allreduce:8:fp32:x1")
    ]
    assert names(SyncConfig(transport="nixl"), model, machines) == ["notified:16:fp32"]


def test_on_gpus_there_are_collectives_only() -> None:
    gpu = torch.device("cuda")
    assert names(SyncConfig(), trained(30, 1), device=gpu) == [
        "allreduce:8:fp32",
        "allreduce:25:fp32",
    ]


def test_one_rank_has_nothing_to_choose() -> None:
    for asked in (SyncConfig(wire="int8"), SyncConfig(update="sharded")):
        (left,) = candidates_of(asked, trained(30, 1), (1,), CPU)
        assert left == SyncConfig(sync="allreduce")


class Notes(NullRecorder):
    """Adds the notes to a list."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def event(self, name: str, **fields: Any) -> None:
        if name == "note":
            self.notes.append(fields["text"])


@dataclass
class Run:
    """A run of two ranks, on the machines that are told, and what its person is told."""

    folder: Path | None = None
    steps: int | None = 10 * NEEDED
    machines: tuple[int, ...] = (2,)
    notes: list[str] = field(default_factory=list)
    candidates: Sequence[SyncConfig] = tuple(TWO)

    def start(self, steps: int) -> list[list[SyncConfig]]:
        """Make so many steps; return with which exchange, by rank."""
        setting = TrialSetting(folder=self.folder, steps=self.steps)

        def on_rank(communicator: Communicator) -> list[SyncConfig]:
            group = world_of(self.machines, communicator.rank)
            chooser = Autotuner(
                self.candidates, run_of(communicator, group, Notes(self.notes)), setting
            )
            now, bound = chooser.begin_generation(), []
            for _ in range(steps):
                now = chooser.next() or now
                bound.append(now)
            return bound

        return run_ranks(2, on_rank)


def test_a_choice_is_told_with_its_figures_and_kept_for_the_next_start(tmp_path: Path) -> None:
    run = Run(tmp_path)
    one, other = run.start(NEEDED)
    assert one == other
    assert {config.sync for config in one} == {"notified", "allreduce"}
    assert not run.notes
    assert not list(tmp_path.iterdir())  # killed here, it would measure again

    one, other = run.start(NEEDED + 2)
    chosen = one[-1]
    assert one[-2:] == other[-2:] == [chosen, chosen]
    (note,) = run.notes
    assert re.fullmatch(
        rf"exchange: {chosen.sync}, {chosen.bucket_mb:g} MB buckets: \S+ ms per step; "
        r"(notified 16|allreduce 8) MB [\d.e+]+"
        r"( \(differences below [\d.]+% are treated as noise\))?\. "
        rf"Pin this choice with --sync {chosen.sync} --bucket_mb {chosen.bucket_mb:g}\.",
        note,
    )
    kept = read_choice(tmp_path)
    assert kept is not None
    assert (kept.sync, kept.bucket_mb) == (chosen.sync, chosen.bucket_mb)
    assert kept.connections == chosen.connections
    assert set(kept.milliseconds) == {"notified 16 MB", "allreduce 8 MB"}

    again = run.start(1)
    assert again == [[chosen], [chosen]]
    assert re.search(r"reused from this run's earlier start \(exchange\.toml\)\.$", run.notes[1])


@dataclass
class GivenTrials:
    """Trials that are over in their first step."""

    outcome: Outcome

    def begin(self) -> int:
        return self.outcome.chosen


def test_a_choice_that_is_not_the_fastest_is_told_with_the_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome = Outcome(chosen=1, seconds={0: 0.0985, 1: 0.1}, noise=0.034)
    monkeypatch.setattr(autotuner, "Trials", lambda count, run: GivenTrials(outcome))
    run = Run()
    run.start(1)
    assert run.notes == [
        "exchange: allreduce, 8 MB buckets: 100 ms per step; notified 16 MB 98.5 (differences "
        "below 3.4% are treated as noise). Pin this choice with --sync allreduce --bucket_mb 8."
    ]


@pytest.mark.parametrize(
    ("connections", "pinned"), [(0, ""), (1, ""), (2, " --connections 2"), (4, " --connections 4")]
)
def test_several_connections_are_pinned_with_the_choice(connections: int, pinned: str) -> None:
    run = Run(
        candidates=[
            SyncConfig(sync="notified", bucket_mb=size, connections=connections) for size in (4, 8)
        ]
    )
    run.start(NEEDED + 1)
    (note,) = run.notes
    assert re.search(rf"--sync notified --bucket_mb [48]{pinned}\.$", note)


@pytest.mark.parametrize("change", ["other machines", "damaged", "not there"])
def test_what_does_not_go_any_more_is_measured_again(tmp_path: Path, change: str) -> None:
    run = Run(tmp_path)
    run.start(NEEDED + 1)
    if change == "other machines":
        run.machines = (1, 1)
    elif change == "damaged":
        (tmp_path / CHOICE_NAME).write_text('sync = "notified"\nbucket')
    else:
        text = (tmp_path / CHOICE_NAME).read_text()
        (tmp_path / CHOICE_NAME).write_text(text.replace('"fp32"', '"bf16"'))
    bound, _ = run.start(NEEDED + 1)
    assert {config.sync for config in bound} == {"notified", "allreduce"}
    assert [" ms per step; " in note for note in run.notes] == [True, True]


def test_a_short_run_is_not_measured() -> None:
    run = Run(steps=10 * NEEDED - 1)
    assert run.start(NEEDED) == [[TWO[1]] * NEEDED] * 2
    assert run.notes == [
        f"exchange: allreduce, 8 MB buckets: {run.steps} steps are too few for autotuning; "
        "set --sync and --bucket_mb to override."
    ]
    run.steps, run.notes = 1, []
    run.start(1)
    assert ": 1 step is too few for autotuning;" in run.notes[0]
    run.steps, run.notes = 0, []  # a run that has come to its end
    run.start(0)
    assert run.notes == []
    run.steps = 10 * NEEDED
    assert len(set(run.start(NEEDED)[0])) == 2


def test_where_nobody_knows_how_long_a_run_is_it_goes_on_for_a_while_first() -> None:
    bound, _ = Run(steps=None).start(WARMUP + NEEDED)
    assert bound[:WARMUP] == [TWO[1]] * WARMUP
    assert set(bound[WARMUP:]) == set(TWO)


def test_who_has_no_folder_measures_at_each_start() -> None:
    run = Run()
    for _ in range(2):
        assert len(set(run.start(NEEDED + 1)[0])) == 2
    assert len(run.notes) == 2
