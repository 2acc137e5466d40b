"""Workers that lead by K steps and no more, and asynchronous ones, over drawn schedules and deaths.

`served_schedules` says what a schedule is, and what must hold. It also makes a thousand of them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.algorithms.served.bounded_staleness import BoundedStaleness, slots_note
from paceline.algorithms.synchronizer import Weights
from paceline.comm.communicator import Communicator, require_same_call
from paceline.errors import ConfigError
from paceline.reduce.put_engine.layout import BucketSpec, Layout, Topology, lay_out
from paceline.timeline.timeline import Timeline
from paceline.wiring.exchange import workers_mean
from tests.harness.equivalence.equivalence_cases import CASES
from tests.harness.equivalence.exchange_state import Rank
from tests.harness.equivalence.large_batch import largest_difference, replicate
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.served_schedules import Schedule, check
from tests.harness.equivalence.served_synchronizers import Served
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.run_folders import wait_until


@pytest.mark.parametrize("disturbed", [False, True], ids=["undisturbed", "with deaths"])
@pytest.mark.parametrize("number", range(15))
def test_leads_reach_the_staleness_and_each_push_counts_once(
    number: int, *, disturbed: bool
) -> None:
    first = random.getrandbits(30)  # of the seed that pytest shows; another one in each run
    check(Schedule.draw(first + number, disturbed=disturbed))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["bounded", "asynchronous"])
def test_running_statistics_are_the_mean_once_the_workers_settle(*, asynchronous: bool) -> None:
    bounded = Served(2, staleness=2)

    def work(c: Communicator) -> tuple[Tensor, Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        served = bounded
        if asynchronous:
            served = Served(2, staleness=None, mean=partial(workers_mean, c))
        replica = replicate(model, optimizer, c, 10**9, served)
        own = torch.zeros(4, dtype=torch.float64)
        for step in range(5):
            x = torch.full((3, 4), float(c.rank + step), dtype=torch.float64)
            with replica_step(replica, step, 0.5):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            own = 0.9 * own + 0.1 * x[0]
        replica.settle(Weights.MERGED)
        mean = model[0].running_mean.clone()  # type: ignore[union-attr, operator]
        replica.drain()
        replica.close()
        return own, mean

    results = run_ranks(2, work)
    expected = sum(own for own, _ in results) / 2
    for own, mean in results:
        torch.testing.assert_close(mean, expected)
        assert not torch.allclose(own, expected)


def test_a_worker_leads_by_the_staleness_where_a_model_has_running_statistics() -> None:
    leads = threading.Event()
    served = Served(1, staleness=2)

    def work(c: Communicator) -> None:
        # The statistics of so many channels are sent from where they lie.
        model = nn.Sequential(nn.BatchNorm1d(2048), nn.Linear(2048, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = replicate(model, optimizer, c, 10**9, served)
        assert c.rank == 0 or leads.wait(30)
        for step in range(5):
            with replica_step(replica, step, 0.5):
                model(torch.randn(3, 2048, dtype=torch.float64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if step == 2:  # which needs version 0
                leads.set()
        replica.drain()
        replica.close()

    run_ranks(2, work)
    served.join()


def test_a_worker_reads_newer_parameters_than_it_must_where_these_have_arrived() -> None:
    served = Served(1, staleness=2)

    def work(c: Communicator) -> None:
        rank = Rank(c, served, None)
        access = rank.replica._binding.access
        assert isinstance(access, BoundedStaleness)

        def arrived(step: int) -> bool:
            return all(access._puts.arrived(each.index, step + 1) for each in access.buckets)

        for step in range(4):
            rank.train(step)
            wait_until(partial(arrived, step))
        assert set(access.reads) == {0}
        rank.close()

    run_ranks(1, work)


def settle_first(model: nn.Module, optimizer: Any, number: int, rank: int) -> None:
    """Settle before each step, as an evaluation does."""
    model.eval()
    model.train()


@pytest.mark.parametrize("case", ["usual", "unused parameters", "three groups", "accumulated"])
def test_workers_that_settle_in_each_step_train_as_one_process_does(case: str) -> None:
    settling = replace(CASES[case](), change=settle_first)
    served = Served(2, late=True, staleness=2)
    states = settling.on_threads(3, 2_000, served)
    served.join()
    for state in states:
        assert largest_difference(state, settling.alone()) < 1e-10


def on_workers(work: Any, staleness: int | None = 2) -> None:
    """Call `work` on each of two workers that are threads."""
    served = Served(1, staleness=staleness)

    def run(c: Communicator) -> None:
        rank = Rank(c, served, None)
        work(rank)
        rank.close()

    run_ranks(2, run)


def test_gradients_that_no_worker_has_are_refused() -> None:
    def work(rank: Rank) -> None:
        rank.train(0)
        rank.replica.begin(1, 0.5)
        rank.backward(1)
        with pytest.raises(ConfigError, match="no worker has their sums"):
            nn.utils.clip_grad_norm_(rank.model.parameters(), 1.0)

    on_workers(work)


def test_a_parameter_that_is_written_while_updates_are_pending_is_refused() -> None:
    def work(rank: Rank) -> None:
        held = [p.data for p in rank.model.parameters()]
        for number in range(3):
            rank.train(number)
        both = rank.communicator.all_reduce
        both(torch.zeros(1)).wait("both have made the same steps")
        rank.replica.settle()
        held[0].mul_(0.5)  # here all is installed
        if rank.communicator.rank == 0:
            rank.train(3)  # its update stays pending: the other worker hasn't made this step
            rank.replica.begin(4, 0.5)
            rank.backward(4)
            held[0].mul_(0.5)
            with pytest.raises(ConfigError, match=r"written while updates were still pending"):
                rank.optimizer.step()
        both(torch.zeros(1)).wait("the refusal")

    on_workers(work)


def meet(rank: Rank) -> None:
    rank.replica._binding.synchronizer.settle(Weights.MERGED)


@pytest.mark.parametrize("before", [meet, lambda rank: rank.train(1)], ids=["meeting", "step"])
def test_a_parameter_that_an_asynchronous_worker_writes_is_refused(
    before: Callable[[Rank], None],
) -> None:
    def work(rank: Rank) -> None:
        rank.train(0)
        rank.replica.settle()
        rank.model.get_parameter("6.bias").data.mul_(0.5)
        with pytest.raises(ConfigError, match="asynchronous workers must not write them"):
            before(rank)

    on_workers(work, staleness=None)


def test_a_barrier_of_asynchronous_workers_names_a_rank_that_is_elsewhere() -> None:
    def work(c: Communicator) -> str:
        value = torch.zeros(1, dtype=torch.float64)
        barrier = partial(workers_mean, c, value)
        elsewhere = partial(require_same_call, c, "world.total()", "", "a total")
        with pytest.raises(ConfigError) as caught:
            (elsewhere if c.rank else barrier)()  # rank 1 has left the loop alone
        return str(caught.value)

    for text in run_ranks(2, work):
        assert "a barrier of asynchronous workers was called on rank 0" in text or (
            "world.total() was called on rank 1 and a barrier of asynchronous workers" in text
        )
        assert text.endswith("all ranks must make the same calls in the same order.")


def test_a_wait_at_a_barrier_of_asynchronous_workers_is_no_time_of_their_own() -> None:
    seconds = 0

    def late(tensor: Tensor) -> Tensor:
        nonlocal seconds
        seconds += 5
        return tensor

    timeline = Timeline(lambda: seconds * 10**9)
    served = Served(1, staleness=None, mean=late, timeline=timeline)

    def work(c: Communicator) -> None:
        rank = Rank(c, served, None)
        rank.train(0)
        rank.replica._binding.synchronizer.settle(Weights.MERGED)
        rank.train(1)
        rank.close()

    run_ranks(1, work)
    assert timeline.now() == 10  # two barriers: before the pull, and before the next push
    assert timeline.own_seconds() == 0


def layout_of(staleness: int, values: int) -> Layout:
    """Lay out float32 parameters in two buckets for two machines and a server."""
    lengths = (values // 2,)
    spec = BucketSpec(
        lengths=lengths, dtype=torch.float32, returns_parameters=True, slots=staleness + 1
    )
    return lay_out([spec, spec], Topology.of([1, 1]).served_by("it"))


def test_a_large_staleness_says_what_its_memory_takes() -> None:
    # A worker has the parameters of each version; a server also both workers' contributions.
    assert str(slots_note(layout_of(8, 2**24), 8)) == (
        "--staleness 8 holds 9 versions of what workers and servers receive, for parameters of "
        "64.0 MiB: 576.3 MiB in each worker and 1,728.8 MiB in each server; a smaller --staleness "
        "takes less."
    )


@pytest.mark.parametrize(("staleness", "values"), [(3, 2**24), (8, 2**18)])
def test_a_small_staleness_or_model_has_no_line_on_memory(staleness: int, values: int) -> None:
    assert slots_note(layout_of(staleness, values), staleness) is None


def test_a_step_without_an_update_leaves_the_parameters() -> None:
    def work(rank: Rank) -> None:
        rank.train(0)
        rank.replica.settle()
        before = [p.detach().clone() for p in rank.model.parameters()]
        for number in (1, 2, 3, 4):
            with replica_step(rank.replica, number, 0.5):
                rank.backward(number)
        rank.replica.settle()
        for p, value in zip(rank.model.parameters(), before, strict=True):
            assert torch.equal(p, value)

    on_workers(work)
