"""Ranks that leave an exchange by puts: well, early, or lost in mid-step."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.algorithms.data_parallel import DataParallel
from paceline.algorithms.notified import make_notified
from paceline.algorithms.open_exchange import PutOptions
from paceline.algorithms.sharded import make_sharded
from paceline.comm.communicator import Communicator
from paceline.comm.peer_activities import Timeout
from paceline.comm.window import Window
from paceline.errors import CommTimeout, PeerLost
from paceline.reduce.put_engine.layout import BucketSpec, Topology, lay_out
from paceline.reduce.put_engine.put_exchange import PutExchange
from paceline.update.shard_optimizer import ShardOptimizer
from paceline.update.updater import make_updater
from tests.harness.equivalence.large_batch import convnet, largest_difference
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.put_synchronizers import in_threads, notified, notified_on_machines
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.twins.window import WindowGroup
from tests.harness.twins.window_context import WindowContext

LIMIT = 1000.0  # longer than a test's: who waits that long fails it
KINDS = {
    "in process": lambda: notified(False, limit=LIMIT),
    "copies": lambda: notified(False, limit=LIMIT, staged=True),
    "sums of GPUs": lambda: notified(
        False, (2, 1), limit=LIMIT, intra_machine=partial(in_threads, limit=LIMIT)
    ),
    "TCP": lambda: notified_on_machines((1, 1, 1), limit=LIMIT),
    "shared memory and TCP": lambda: notified_on_machines((2, 1), limit=LIMIT),
}
LOST, STEP = 2, 2

MakeBench = Callable[[Communicator], Bench]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return convnet()


@pytest.fixture(params=KINDS)
def bench_of(request: pytest.FixtureRequest, model: nn.Module) -> MakeBench:
    """Return what makes a rank's bench."""
    kind = KINDS[request.param]()
    return lambda communicator: Bench.of(communicator, model, kind=kind)


def end(bench: Bench) -> None:
    bench.replica.settle()
    bench.replica.drain()
    bench.replica.close()


def said_by(bench: Bench) -> str:
    """Train; return what ends that."""
    try:
        for number in range(9):
            bench.step(number)
    except PeerLost as error:
        return str(error)
    finally:
        bench.replica.close()
    raise AssertionError("nobody was lost")


@pytest.mark.parametrize("moment", ["between steps", "in mid-step"])
def test_survivors_name_the_lost_rank_though_they_wait_for_each_other(
    bench_of: MakeBench, moment: str
) -> None:
    def train(communicator: Communicator) -> str:
        bench = bench_of(communicator)
        if communicator.rank != LOST:
            return said_by(bench)
        lose(bench, moment)
        return ""

    named(run_ranks(3, train))


def lose(bench: Bench, moment: str) -> None:
    """Train for some steps, and go without a word."""
    for number in range(STEP):
        bench.step(number)
    if moment == "in mid-step":
        bench.model[2].weight.register_hook(throw)  # type: ignore[index]
        with pytest.raises(KeyError):
            bench.step(STEP)
    bench.replica.close()


@pytest.mark.parametrize("moment", ["between steps", "in mid-step"])
def test_who_adds_up_with_a_lost_rank_names_it_and_the_other_machines_hear_of_it(
    model: nn.Module, moment: str
) -> None:
    kind = notified(False, (1, 2), limit=LIMIT, intra_machine=partial(in_threads, limit=LIMIT))

    def train(communicator: Communicator) -> str:
        bench = Bench.of(communicator, model, kind=kind)
        if communicator.rank != LOST:
            return said_by(bench)
        lose(bench, moment)
        return ""

    other, leader, _ = run_ranks(3, train)
    assert leader.startswith(f"rank 1 lost rank {LOST} in bucket ")
    assert leader.endswith("the connection inside their machine ended.")
    assert other.startswith("rank 0 lost rank 1 in ")


def named(said: list[str]) -> None:
    """Require the lost rank's name of the first survivor who noticed; the other may lose that."""
    assert any(f"lost rank {LOST} in " in sentence for sentence in said[:LOST]), said
    assert not any("waiting for notifications" in sentence for sentence in said)


def throw(_: Tensor) -> None:
    raise KeyError("a bug in backward")


def test_who_ends_well_before_the_others_is_lost_to_them_at_once(bench_of: MakeBench) -> None:
    def train(communicator: Communicator) -> str:
        bench = bench_of(communicator)
        if communicator.rank != LOST:
            return said_by(bench)
        for number in range(STEP):
            bench.step(number)
        end(bench)
        return ""

    named(run_ranks(3, train))


def test_one_rank_alone_looks_at_the_model_between_steps(
    bench_of: MakeBench, model: nn.Module
) -> None:
    def train(communicator: Communicator, *, looks: bool) -> dict[str, Tensor]:
        bench = bench_of(communicator)
        for number in range(4):
            bench.step(number)
            if looks and communicator.rank == 0:
                bench.model.eval()
                bench.model(bench.batches[0][0])
                bench.model.state_dict()
                bench.model.train()
        state = {name: value.clone() for name, value in bench.model.state_dict().items()}
        end(bench)
        return state

    looked = run_ranks(3, lambda c: train(c, looks=True))
    assert all(largest_difference(looked[0], other) == 0 for other in looked[1:])
    plain = run_ranks(3, lambda c: train_plainly(c, model))
    assert largest_difference(looked[0], plain[0]) < 1e-10


def test_a_sum_that_doesnt_come_back_is_missed_by_its_owners_name() -> None:
    topology = Topology.of((1, 2))
    spec = BucketSpec(lengths=(64,), dtype=torch.float32, returns_parameters=True)
    layout = lay_out([spec], topology)
    windows = WindowGroup(3, layout.size, layout.notifications, (1, 2))
    said: dict[int, str] = {}
    told = Barrier(3)

    def work(communicator: Communicator) -> None:
        rank, ones = communicator.rank, torch.ones(64)
        window, timeout = windows.window(rank), Timeout(1.0, 1.0)
        exchange = PutExchange(window, layout, [[ones]], [["weight"]], timeout)
        version = exchange.send(0, [ones], 1.0, "bucket 0 in step 0")
        if rank == 0:
            exchange.return_sums(0, lambda _: None)  # rank 1, which owns the other half, doesn't
            with pytest.raises(CommTimeout) as caught:
                exchange.wait(0, version)
            said[rank] = str(caught.value)
        told.wait()
        exchange.close()

    run_ranks(3, work)
    assert said[0].startswith("rank 0 waited 1 s for rank 1 in bucket 0 in step 0: it hangs")


def test_a_put_to_a_peer_that_only_followed_the_lost_one_names_the_lost_one() -> None:
    layout = lay_out([BucketSpec(lengths=(64,), dtype=torch.float32)], Topology.of([1] * 3))
    group, ones = WindowGroup(3, layout.size, layout.notifications), torch.ones(64)
    before = set(threading.enumerate())
    exchange = PutExchange(group.window(0), layout, [[ones]], [["weight"]], Timeout(LIMIT, LIMIT))
    (reducer,) = set(threading.enumerate()) - before
    group.window(LOST).close()
    reducer.join(30)  # it has noticed that
    group.window(1).close()  # as a rank does that has lost another
    with pytest.raises(PeerLost, match=f"rank 0 lost rank {LOST} in bucket 0 in step 0: "):
        exchange.send(0, [ones], 1.0, "bucket 0 in step 0")
    exchange.close()


def train_plainly(communicator: Communicator, model: nn.Module) -> dict[str, Tensor]:
    bench = Bench.of(communicator, model)
    for number in range(4):
        bench.step(number)
    return bench.model.state_dict()


def watched(kind: Callable[..., Any], made: dict[int, list[weakref.ref[Any]]]) -> Any:
    """Make synchronizers, and note each rank's, with its window."""

    def make(buckets: Any, updater: Any, statistics: Any, options: PutOptions) -> DataParallel:
        windows: list[Window] = []

        def opened(size: int, notifications: int) -> Window:
            window = options.context.window(options.purpose, options.window, size, notifications)
            windows.append(window)
            return window

        context = WindowContext(opened, options.context.limits[1])
        synchronizer = kind(buckets, updater, statistics, replace(options, context=context))
        made[windows[0].rank] += [weakref.ref(synchronizer), weakref.ref(windows[0])]
        return synchronizer  # type: ignore[no-any-return]

    return make


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Look for no garbage, as if all that there is were kept for good (`cli.applied`)."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("how", ["plain", "sharded", "int8", "staged", "sums of GPUs"])
def test_an_exchange_that_another_replaces_gives_its_memory_back(
    model: nn.Module, how: str
) -> None:
    made: dict[int, list[weakref.ref[Any]]] = defaultdict(list)
    kind: Any = make_sharded if how == "sharded" else make_notified
    machines, intra_machine = ((2, 1), in_threads) if how == "sums of GPUs" else ((1, 1, 1), None)
    wire = "int8" if how == "int8" else "fp32"
    watching: Any = watched(kind, made)
    make: Any = notified(
        False, machines, wire, watching, staged=how == "staged", intra_machine=intra_machine
    )
    make.updater = ShardOptimizer if kind is make_sharded else make_updater

    def train(communicator: Communicator) -> list[object]:
        bench = Bench.of(communicator, model, kind=make)
        bench.step(0)
        bench.step(1)
        bench.model[6].requires_grad_(False)  # type: ignore[index]
        bench.step(2)
        left = [one() for one in made[communicator.rank][:2]]
        end(bench)
        return left

    model.float()
    assert run_ranks(3, train) == [[None, None]] * 3
