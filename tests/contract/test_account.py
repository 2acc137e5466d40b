"""What a step is told to have sent, received and waited for is what its windows carried."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.data_parallel import DataParallel
from paceline.algorithms.notified import PutOptions, make_notified
from paceline.cluster.supervision.stop_signals import StopSignals
from paceline.codecs.codecs import CODECS
from paceline.comm.communicator import Communicator
from paceline.comm.window import Source, Window, bytes_of
from paceline.data.order import Order
from paceline.recorder import NullRecorder
from paceline.reduce.buckets import Bucket
from paceline.reduce.put_engine.layout import Topology
from paceline.run.steps import Steps
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.position import Position
from paceline.snapshots.schedule import SavePolicy
from paceline.snapshots.step_snapshots import StepSnapshots
from paceline.timeline.timeline import WAIT_FOR_INPUT, Timeline
from tests.harness.equivalence.large_batch import Training, World, convnet, usual_step
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.put_synchronizers import LIMIT
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import run_step
from tests.harness.processes.worlds import run_of
from tests.harness.twins.window import InProcessWindow, WindowGroup
from tests.harness.twins.window_context import WindowContext

STEPS = 3
PARTS = (
    *("compute_ms", "exposed_ms", "send_ms", "update_ms", "snapshot_ms", "check_ms"),
    *("boundary_ms", "wait_input_ms"),
)


class Figures(Timeline):
    """Adds up counts, and counts the spans of each bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.seen: Counter[tuple[str, object]] = Counter()

    def span(self, name: str, **fields: object) -> Any:
        self.seen[name, fields["bucket"]] += 1
        return super().span(name, **fields)

    def count(self, name: str, amount: float) -> None:
        self.counts[name] += int(amount)


class Scales(InProcessWindow):
    """A window that weighs what is put."""

    def __init__(self, group: WindowGroup, rank: int, weighed: Counter[tuple[int, int]]) -> None:
        super().__init__(group, rank)
        self._weighed = weighed

    def put(self, peer: int, offset: int, source: Source, *note: Any) -> None:
        with self._group.lock:
            self._weighed[self.rank, peer] += sum(part.numel() for part in bytes_of(source))
        super().put(peer, offset, source, *note)


class Ranks:
    """Makes the synchronizer of each rank, with figures."""

    def __init__(self, machines: Sequence[int] = (), wire: str = "fp32") -> None:
        self.weighed: Counter[tuple[int, int]] = Counter()
        self.figures: dict[int, Figures] = {}
        self.buckets = 0
        self._machines, self._wire = machines, CODECS[wire]
        self._group: WindowGroup | None = None
        self._lock = threading.Lock()

    def allreduce(self, buckets: Sequence[Bucket], c: Communicator, *parts: Any) -> DataParallel:
        self.buckets, self.figures[c.rank] = len(buckets), Figures()
        return make_allreduce(buckets, c, *parts, self.figures[c.rank])

    def notified(self, buckets: Sequence[Bucket], c: Communicator, *parts: Any) -> DataParallel:
        def open_window(size: int, notifications: int) -> Window:
            with self._lock:
                self._group = self._group or WindowGroup(
                    c.world_size, size, notifications, self._machines
                )
            return Scales(self._group, c.rank, self.weighed)

        self.buckets, self.figures[c.rank] = len(buckets), Figures()
        topology = Topology.of(self._machines or [1] * c.world_size)
        options = PutOptions(
            context=WindowContext(open_window, LIMIT),
            purpose="gradients",
            topology=topology,
            timeline=self.figures[c.rank],
            codec=self._wire,
        )
        return make_notified(buckets, *parts, options)


def float32_step(world: World, model: nn.Module, o: Optimizer, x: Tensor, y: Tensor) -> None:
    usual_step(world, model, o, x.float(), y)


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("machines", [(1, 1), (1, 1, 1), (2, 2), (3, 2), (2,)], ids=str)
@pytest.mark.parametrize("bucket_bytes", [1, 10**9])
def test_what_is_told_to_be_sent_is_what_was_put(
    machines: tuple[int, ...], bucket_bytes: int, wire: str
) -> None:
    ranks = Ranks(machines, wire)
    training = Training.of(convnet().float(), steps=STEPS, make_step=lambda: float32_step)
    training.on_threads(sum(machines), bucket_bytes, ranks.notified)
    for rank, figures in ranks.figures.items():
        sent = sum(size for (source, _), size in ranks.weighed.items() if source == rank)
        received = sum(size for (_, target), size in ranks.weighed.items() if target == rank)
        assert (figures.counts["sent"], figures.counts["received"]) == (sent, received)
    assert any(ranks.weighed.values()) == (len(machines) > 1)


def test_an_all_reduce_counts_as_a_ring() -> None:
    ranks = Ranks()
    model = convnet()
    values = sum(p.numel() + 1 for p in model.parameters())  # and a count of who used it
    Training.of(model, steps=STEPS).on_threads(4, 10**9, ranks.allreduce)
    for figures in ranks.figures.values():
        assert figures.counts["sent"] == figures.counts["received"]
        assert figures.counts["sent"] == pytest.approx(STEPS * 1.5 * 8 * values, abs=STEPS * 4)


@pytest.mark.parametrize("method", ["allreduce", "notified"])
def test_each_bucket_is_sent_waited_for_and_updated_once_a_step(method: str) -> None:
    ranks = Ranks()
    Training.of(convnet(), steps=STEPS).on_threads(2, 1, getattr(ranks, method))
    for figures in ranks.figures.values():
        expected = {
            (name, bucket): STEPS
            for name in ("wait", "send", "update")
            for bucket in range(ranks.buckets)
        }
        assert figures.seen == expected


class Shares(NullRecorder):
    """Keeps which share of the time from one step's end to the next one's has an account."""

    def __init__(self, timeline: Timeline) -> None:
        self.shares: list[float] = []
        self._timeline = timeline
        self._ended = timeline.now()

    def event(self, name: str, **fields: Any) -> None:
        if name == "step":
            now = self._timeline.now()
            spent = sum(fields[part] for part in PARTS)
            self.shares.append(spent / (1000 * (now - self._ended)))
            self._ended = now


def inputs(count: int) -> Iterator[Tensor]:
    """Compute the samples when they are asked for, as a loader without processes does."""
    for _ in range(count):
        yield torch.randn(512, 512).erfinv_()


def test_an_account_covers_nearly_all_of_a_step() -> None:
    def on_rank(c: Communicator) -> list[float]:
        timeline = Timeline()
        recorder = Shares(timeline)
        run = run_of(c, recorder=recorder, timeline=timeline)
        layers = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.Tanh())]
        bench = Bench.of(
            c,
            nn.Sequential(*layers),
            bucket_bytes=2**20,
            kind=lambda *parts: make_allreduce(*parts, timeline),
        )
        objects = StateObjects(model=bench.model, optimizer=bench.optimizer)
        steps = Steps(
            bench.replica,
            run,
            None,
            seed=0,
            position=Position(),
            policy=SavePolicy(),
            requests=StopSignals(),
            snapshots=StepSnapshots(run, bench.replica, objects),
        )
        order = Order(size=12 * 1024, batch_size=1024)
        for number, x in enumerate(timeline.each(WAIT_FOR_INPUT, inputs(order.steps))):
            with run_step(steps, order.place(0, number, c.rank, c.world_size)):
                bench.model(x).square().mean().backward()
                bench.optimizer.step()
                bench.optimizer.zero_grad()
        return recorder.shares

    for _, *shares in run_ranks(2, on_rank):  # without the first, which all else was made in
        assert len(shares) == 11
        assert max(shares) <= 1.0
        # Other processes may interrupt a step between two of its parts, but not all steps.
        assert sorted(shares)[-3] >= 0.95
