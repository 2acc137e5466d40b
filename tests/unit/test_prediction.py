"""A step's time is predicted for each exchange from the model's own times and the link."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator
from paceline.config.world import SyncConfig
from paceline.errors import Message
from paceline.generation.run import Run
from paceline.replica.replica import Replica
from paceline.replica.trained_parameters import TrainedParameters
from paceline.run.autotune import prediction
from paceline.run.autotune.autotuner import (
    UNTIMED,
)
from paceline.run.autotune.prediction import StepPredictor, Traffic, predicted_seconds
from paceline.run.autotune.step_schedule import (
    Parameter,
    Profile,
    seconds_by_urgency,
    seconds_in_order,
)
from paceline.wiring.exchange import replicate
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.worlds import run_of, world_of
from tests.harness.twins.communicator import ThreadGroup

CPU = torch.device("cpu")


def two_layers() -> Profile:
    """Return layers a and b: b's gradient is complete at 1, a's at 2; a is read first."""
    return Profile(
        forward=2,
        backward=2,
        update=0,
        parameters=(
            Parameter(nbytes=4, ready=2, read=0),
            Parameter(nbytes=8, ready=1, read=1),
        ),
    )


def test_what_is_read_first_interrupts_what_is_complete_first() -> None:
    """By urgency b has the link in 1…2, a in 2…6, b in 6…13: the forward of b is in 13…14."""
    assert seconds_by_urgency(two_layers(), [[0], [1]], 1) == 14
    assert seconds_in_order(two_layers(), [[0], [1]], 1) == 15  # b in 1…9, a in 9…13
    assert seconds_by_urgency(two_layers(), [[0, 1]], 1) == 16
    assert seconds_in_order(two_layers(), [[0, 1]], 1) == 16


class EqualLayers(nn.Module):
    """100 parameters of 40 kB."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(10_000)) for _ in range(100))


@pytest.fixture
def long_model() -> tuple[TrainedParameters, Profile]:
    """Return a model of 4 MB, whose layers take equally long, and its profile."""
    model = EqualLayers()
    trained = TrainedParameters.of(model, torch.optim.SGD(model.parameters()))
    parameters = (Parameter(nbytes=40_000, ready=(100 - i) / 100, read=i / 200) for i in range(100))
    profile = Profile(forward=0.5, backward=1.0, update=0.0, parameters=tuple(parameters))
    return trained, profile


def traffic(
    seconds: float, machines: Sequence[int] = (1, 1), nonzero: Mapping[Tensor, float] | None = None
) -> Traffic:
    """Describe a link on which 4 MB take so many seconds."""
    return Traffic(
        seconds_per_byte=seconds / 4e6, workers_per_machine=machines, nonzero=nonzero or {}
    )


def config(sync: Any, bucket_mb: float = 16, **options: Any) -> SyncConfig:
    return SyncConfig(sync=sync, bucket_mb=bucket_mb, **options)


def test_on_a_slow_link_small_buckets_by_puts_are_predicted_to_be_fastest(
    long_model: tuple[TrainedParameters, Profile],
) -> None:
    trained, profile = long_model
    puts, large_puts, collectives = (
        predicted_seconds(one, profile, trained, traffic(1.0))
        for one in (config("notified", 0.5), config("notified"), config("allreduce", 0.5))
    )
    assert profile.compute < puts < min(large_puts, collectives)
    assert max(large_puts, collectives) < profile.compute + 1


def test_on_a_fast_link_the_fewest_buckets_are_predicted_to_be_fastest(
    long_model: tuple[TrainedParameters, Profile],
) -> None:
    trained, profile = long_model
    few, many, collectives = (
        predicted_seconds(one, profile, trained, traffic(0.0))
        for one in (config("notified"), config("notified", 0.5), config("allreduce"))
    )
    assert profile.compute < few < many
    assert few < collectives


@pytest.mark.parametrize(("seconds", "share"), [(0.0, 1.0), (100.0, 0.0)])
def test_the_work_of_buckets_costs_nothing_where_a_step_waits_for_the_link_anyway(
    seconds: float,
    share: float,
    long_model: tuple[TrainedParameters, Profile],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained, profile = long_model
    steps = []
    for work in (0.0, 0.01):
        monkeypatch.setattr(prediction, "_BUCKET_SECONDS", work)
        one = config("notified", 0.04)  # a parameter a bucket
        steps.append(predicted_seconds(one, profile, trained, traffic(seconds)))
    assert (steps[1] - steps[0]) / (100 * 0.01) == pytest.approx(share, abs=0.05)


def test_a_lossy_wire_is_predicted_by_its_bytes(
    long_model: tuple[TrainedParameters, Profile],
) -> None:
    trained, profile = long_model
    fp32, bf16, int8 = (
        predicted_seconds(config("notified", wire=wire), profile, trained, traffic(1000.0))
        for wire in ("fp32", "bf16", "int8")
    )
    assert bf16 / fp32 == pytest.approx(1 / 2, rel=0.01)
    assert int8 / fp32 == pytest.approx((1 + 4 / 256) / 4, rel=0.01)  # a scale for 256


def test_puts_send_a_copy_a_machine_and_a_ring_one_a_rank(
    long_model: tuple[TrainedParameters, Profile],
) -> None:
    trained, profile = long_model
    slow = traffic(1000.0, (2, 2))
    puts, ring = (
        predicted_seconds(config(sync), profile, trained, slow)
        for sync in ("notified", "allreduce")
    )
    assert puts / ring == pytest.approx((2 * 1 / 2) / (2 * 3 / 4), rel=0.01)


@pytest.mark.parametrize(
    ("machines", "nonzero", "options", "share"),
    [
        ((1, 1), 1 / 4, {}, (1 / 4 + 7 / 16) / 2),
        ((1, 1), 1 / 4, {"update": "sharded"}, (1 / 4 + 1) / 2),
        ((2, 1), 1 / 4, {}, (7 / 16 + 37 / 64) / 2),
        ((1, 1), 1 / 2, {}, (1 / 2 + 1) / 2),  # 3/4 of the sum aren't zero: too many
        ((1, 1), 0.8, {}, 1.0),
        ((2,), 1 / 4, {}, 1.0),
    ],
)
def test_puts_between_machines_leave_out_a_tables_zeros(
    long_model: tuple[TrainedParameters, Profile],
    machines: tuple[int, ...],
    nonzero: float,
    options: dict[str, Any],
    share: float,
) -> None:
    trained, profile = long_model
    rows, dense = (
        predicted_seconds(
            config("notified", **options), profile, trained, traffic(1000.0, machines, tables)
        )
        for tables in (dict.fromkeys(trained.names, nonzero), {})
    )
    assert rows / dense == pytest.approx(share, rel=0.01)


def test_a_table_in_a_bucket_of_other_parameters_is_sent_whole(
    long_model: tuple[TrainedParameters, Profile],
) -> None:
    trained, profile = long_model
    first = next(iter(trained.names))
    times = {
        name: predicted_seconds(config(sync), profile, trained, traffic(1000.0, nonzero=tables))
        for name, sync, tables in [
            ("puts", "notified", {first: 0.1}),
            ("dense puts", "notified", {}),
            ("collectives", "allreduce", dict.fromkeys(trained.names, 0.1)),
            ("dense collectives", "allreduce", {}),
        ]
    }
    assert times["puts"] == times["dense puts"]
    assert times["collectives"] == times["dense collectives"]


@contextmanager
def replicated(
    model: nn.Module, communicator: Communicator, machines: Sequence[int] = (1, 1)
) -> Iterator[tuple[Replica, torch.optim.Optimizer, Run]]:
    """Bind a model to the other ranks by collectives."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = run_of(communicator, world_of(machines, communicator.rank))
    replica = replicate(model, optimizer, run, SyncConfig(sync="allreduce"))
    yield replica, optimizer, run
    replica.close()


def predict(
    model: nn.Module,
    communicator: Communicator,
    machines: Sequence[int] = (1, 1),
    batches: Sequence[Tensor] = (torch.ones(2, 3),) * 4,
    *,
    freeze: bool = False,
    clip: bool = False,
    notes: list[Message | None] | None = None,
) -> list[float] | None:
    """Train a model's batches by real steps, all but the first timed; return the predictions."""
    candidates = [config("notified"), config("notified", 4)]
    with replicated(model, communicator, machines) as (replica, optimizer, run):
        predictor = StepPredictor(candidates, model, run)
        predictor.watch(replica)
        for number, batch in enumerate(batches):
            if number == 1:
                before = hooks_of(model)  # the first step traces the reads
            if number:
                predictor.begin_step()
            with replica_step(replica, number, 1 / communicator.world_size):
                model(batch).sum().backward()
                if clip:
                    replica.reduce()
                optimizer.step()
                optimizer.zero_grad()
        predictor.begin_step()
        if freeze:
            model[1].requires_grad_(False)
        found = predictor.predict()
        assert hooks_of(model) == before
        if notes is not None:
            notes.append(predictor.note)
        return found


def hooks_of(model: nn.Module) -> int:
    """Count the hooks on a model and its parameters."""
    modules = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    return modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def test_all_ranks_get_rank_0s_predictions() -> None:
    one, other = run_ranks(2, lambda communicator: predict(linear(), communicator))
    assert one is not None
    assert one == other
    assert len(one) == 2
    assert min(one) > 0


@pytest.mark.parametrize(("seconds", "noted"), [(1.0, True), (1e-12, False)])
def test_a_slow_link_between_machines_is_noted(
    seconds: float, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "seconds_per_byte", lambda *_: seconds)
    notes: list[Message | None] = []
    run_ranks(2, lambda communicator: predict(linear(), communicator, notes=notes))
    texts = ["" if note is None else str(note) for note in notes]
    assert ["--sync average" in text for text in texts] == [noted] * 2
    notes.clear()
    run_ranks(2, lambda communicator: predict(linear(), communicator, (2,), notes=notes))
    assert notes == [None, None]


def test_nothing_is_predicted_for_parameters_that_have_changed() -> None:
    results = run_ranks(2, lambda communicator: predict(linear(), communicator, freeze=True))
    assert results == [None, None]


@pytest.mark.parametrize("clip", [False, True])
def test_a_step_that_reduces_is_predicted_so(clip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles: list[Profile] = []

    def record(config: SyncConfig, profile: Profile, *_: object) -> float:
        profiles.append(profile)
        return 1.0

    monkeypatch.setattr(prediction, "predicted_seconds", record)
    run_ranks(2, lambda communicator: predict(linear(), communicator, clip=clip))
    assert len(profiles) >= 4
    assert {profile.reduces for profile in profiles} == {clip}


def test_a_tables_rows_are_counted_in_its_first_timed_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares: list[list[float]] = []

    def record(config: SyncConfig, profile: Profile, trained: object, traffic: Traffic) -> float:
        shares.append(list(traffic.nonzero.values()))
        return 1.0

    monkeypatch.setattr(prediction, "predicted_seconds", record)
    model = nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 2))  # a table of 1 MiB
    batches = [torch.arange(words) for words in (10, 1024, 10)]
    assert predict(model, ThreadGroup(1).communicator(0), (1,), batches) == [1.0, 1.0]
    assert shares == [[0.25], [0.25]]


def test_a_replica_that_closes_in_a_timed_step_leaves_no_hook() -> None:
    def on_rank(communicator: Communicator) -> int:
        model = nn.Sequential(*(nn.Linear(700, 700) for _ in range(6)))  # 12 MB
        before = hooks_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run = run_of(communicator, world_of((1, 1), communicator.rank))
        replica = replicate(model, optimizer, run, SyncConfig())
        counts = []
        for number in range(UNTIMED + 2):
            with replica_step(replica, number, 1 / 2):
                counts.append(hooks_of(model))
                model(torch.ones(1, 700)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert counts[-1] > counts[-3]  # those that take the times
        replica.close()
        return hooks_of(model) - before

    assert run_ranks(2, on_rank) == [0, 0]


def test_a_predictor_that_has_predicted_can_begin_again() -> None:
    """As in a later generation."""

    def on_rank(communicator: Communicator) -> list[bool]:
        model = linear()
        candidates = [config("notified"), config("notified", 4)]
        with replicated(model, communicator) as (replica, optimizer, run):
            predictor = StepPredictor(candidates, model, run)
            predictor.watch(replica)
            predicted = []
            for number in range(9):
                if number:
                    predictor.begin_step()
                if number in (4, 8):
                    predicted.append(predictor.predict() is not None)
                    model[1].requires_grad_(False)  # what was measured holds no more
                with replica_step(replica, number, 1 / communicator.world_size):
                    model(torch.ones(2, 3)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return predicted

    assert run_ranks(2, on_rank) == [[True, True]] * 2
