"""What a step is told to have sent, received and waited for is what its windows carried."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.data_parallel import DataParallel
from paceline.algorithms.notified import PutOptions, make_notified
from paceline.codecs.codecs import CODECS
from paceline.comm.communicator import Communicator
from paceline.comm.window import Source, Window, bytes_of
from paceline.recorder import NullRecorder
from paceline.reduce.buckets import Bucket
from paceline.reduce.put_engine.layout import Topology
from tests.harness.equivalence.large_batch import Training, World, convnet, usual_step
from tests.harness.twins.window import InProcessWindow, WindowGroup

STEPS = 3


class Figures(NullRecorder):
    """Adds up counts, and counts the spans of each bucket."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.spans: Counter[tuple[str, object]] = Counter()

    @contextmanager
    def span(self, name: str, **fields: object) -> Iterator[None]:
        self.spans[name, fields["bucket"]] += 1
        yield

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
            open_window=open_window,
            topology=topology,
            limits=(30.0, 30.0),
            recorder=self.figures[c.rank],
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
        assert figures.spans == expected
