"""Bounded staleness: workers lead by K steps and no more, and a model in NumPy has the same result.

A schedule says which worker waits, before it makes a step, until which other one has begun a later
step. So the order of the steps is drawn, and nothing sleeps. The plain model (stale synchronous
parallel; Ho et al., 2013) gets which version of each parameter each step has read.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.algorithms.synchronizer import Weights
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from tests.harness.equivalence.equivalence_cases import CASES
from tests.harness.equivalence.exchange_state import Rank
from tests.harness.equivalence.large_batch import largest_difference, replicate
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.served_synchronizers import Served
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.network.window_kinds import LIMIT

pytestmark = pytest.mark.usefixtures("one_core")

RATE, MOMENTUM, DECAY = 0.01, 0.9, 0.01
Values = dict[str, NDArray[np.float64]]
Batch = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True)
class Schedule:
    """Schedule of a run.

    Attributes:
        workers, servers, staleness, steps: of the run.
        bucket_bytes: size of a bucket.
        late: puts are late and overtake each other.
        gates: for a worker and its step: another worker, and the step that it must have begun.
        batches: for each step, each worker's samples.
    """

    workers: int
    servers: int
    staleness: int
    steps: int
    bucket_bytes: int
    late: bool
    gates: Mapping[tuple[int, int], tuple[int, int]]
    batches: Sequence[Sequence[Batch]]

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        """Draw a schedule in which some worker is to lead by all of the staleness.

        In each block of steps, the others wait for one worker alone, and for steps of the block. It
        needs of them what they have made before, so that none waits for itself.
        """
        draw = random.Random(seed)
        workers, staleness = draw.randint(2, 4), draw.randint(1, 3)
        blocks = draw.randint(2, 3)
        length = staleness + draw.randint(1, 3)
        gates = {}
        for block in range(blocks):
            first, end = block * length, (block + 1) * length
            fastest, *slower = draw.sample(range(workers), workers)
            gates[slower[-1], first] = fastest, first + staleness
            for worker in slower:
                for step in range(first, end):
                    lead = draw.randint(0, staleness)
                    if draw.random() < 0.5 and step + lead < end:
                        gates.setdefault((worker, step), (fastest, step + lead))
        numbers = np.random.default_rng(seed)
        steps = blocks * length
        sizes = [[draw.randint(1, 4) for _ in range(workers)] for _ in range(steps)]
        batches = [
            [(numbers.normal(size=(n, 6)), numbers.normal(size=(n, 3))) for n in each]
            for each in sizes
        ]
        return cls(
            workers=workers,
            servers=draw.randint(1, 3),
            staleness=staleness,
            steps=steps,
            bucket_bytes=draw.choice([1, 100, 10**9]),
            late=draw.random() < 0.5,
            gates=gates,
            batches=batches,
        )

    def weight(self, step: int, worker: int) -> float:
        """Return a worker's share of a step's samples."""
        sizes = [len(x) for x, _ in self.batches[step]]
        return sizes[worker] / sum(sizes)


@dataclass
class Progress:
    """What the workers have begun and read so far.

    Attributes:
        begun: by worker, the last step that it has begun.
        trained: by worker, the steps whose gradients it may have sent.
        lead: the largest one so far.
        reads: by worker and step, the version of each parameter that it read.
    """

    begun: dict[int, int]
    trained: dict[int, int]
    lead: int = 0
    reads: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @classmethod
    def of(cls, workers: int) -> Progress:
        return cls(dict.fromkeys(range(workers), -1), dict.fromkeys(range(workers), 0))

    def await_begun(self, worker: int, step: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.begun[worker] >= step, LIMIT)

    def begin(self, worker: int, step: int, read: dict[str, int]) -> None:
        """Note that a worker has read the parameters of a step."""
        with self.changed:
            self.begun[worker] = step
            self.reads[worker, step] = read
            self.lead = max(self.lead, step - min(self.trained.values()))
            self.changed.notify_all()

    def train(self, worker: int, step: int) -> None:
        """Note that a worker is about to send the gradients of a step."""
        with self.changed:
            self.trained[worker] = step + 1


def layers() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()


def train(schedule: Schedule, served: Served) -> tuple[list[dict[str, Tensor]], Progress]:
    """Train on threads; return the workers' final states and what they read."""
    progress = Progress.of(schedule.workers)
    start = layers()

    def work(c: Communicator) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY
        )
        replica = replicate(model, optimizer, c, schedule.bucket_bytes, served)
        synchronizer: Any = replica._binding.synchronizer
        for step in range(schedule.steps):
            if (gate := schedule.gates.get((c.rank, step))) is not None:
                progress.await_begun(*gate)
            x, y = map(torch.from_numpy, schedule.batches[step][c.rank])
            with replica_step(replica, step, schedule.weight(step, c.rank)):
                loss = ((model(x) - y) ** 2).mean()
                progress.begin(c.rank, step, installed(synchronizer))
                progress.train(c.rank, step)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        behind = max(synchronizer.reads)
        assert behind <= schedule.staleness
        replica.drain()
        replica.close()
        return state

    states = run_ranks(schedule.workers, work)
    served.join()
    return states, progress


def installed(synchronizer: Any) -> dict[str, int]:
    """Return the version of each parameter on a worker."""
    return {
        name: synchronizer.installed[bucket.index]
        for bucket in synchronizer.buckets
        for name in bucket.names
    }


def modelled(schedule: Schedule, reads: Mapping[tuple[int, int], dict[str, int]]) -> Values:
    """Train by NumPy, each gradient at the versions that were read; return the last version."""
    start = {name: p.detach().numpy().copy() for name, p in layers().named_parameters()}
    versions = [start]
    momenta: Values = {}
    for step in range(schedule.steps):
        total: Values = {name: np.zeros_like(value) for name, value in start.items()}
        for worker in range(schedule.workers):
            read = {name: versions[v][name] for name, v in reads[worker, step].items()}
            gradients = gradients_of(read, *schedule.batches[step][worker])
            for name, gradient in gradients.items():
                total[name] += schedule.weight(step, worker) * gradient
        last = versions[-1]
        total = {name: value + DECAY * last[name] for name, value in total.items()}
        momenta = {name: MOMENTUM * momenta.get(name, 0.0) + value for name, value in total.items()}
        versions.append({name: value - RATE * momenta[name] for name, value in last.items()})
    return versions[-1]


def gradients_of(read: Values, x: NDArray[np.float64], y: NDArray[np.float64]) -> Values:
    """Return the gradients of the mean of squares of two linear layers' errors."""
    hidden = x @ read["0.weight"].T + read["0.bias"]
    error = 2 * (hidden @ read["1.weight"].T + read["1.bias"] - y) / y.size
    back = error @ read["1.weight"]
    return {
        "0.weight": back.T @ x,
        "0.bias": back.sum(0),
        "1.weight": error.T @ hidden,
        "1.bias": error.sum(0),
    }


@pytest.mark.parametrize("seed", range(40))
def test_no_worker_leads_by_more_than_the_staleness_and_each_push_counts_once(seed: int) -> None:
    schedule = Schedule.draw(seed)
    served = Served(schedule.servers, late=schedule.late, staleness=schedule.staleness)
    (first, *others), progress = train(schedule, served)
    assert progress.lead == schedule.staleness
    for (_, step), read in progress.reads.items():
        assert all(step - schedule.staleness <= version <= step for version in read.values())
    assert {v for server in served.running for v in server.versions} == {schedule.steps}
    expected = modelled(schedule, progress.reads)
    for name, value in expected.items():
        np.testing.assert_allclose(first[name].numpy(), value, rtol=0, atol=1e-10)
    for other in others:
        assert largest_difference(first, other) == 0


@pytest.mark.parametrize("scales_rate", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_each_asynchronous_push_is_an_update_in_the_order_of_arrival(
    seed: int, scales_rate: bool
) -> None:
    schedule = Schedule.draw(seed)
    start = layers()
    served = Served(schedule.servers, late=True, staleness=None, scales_rate=scales_rate)
    shards: dict[tuple[int, int], dict[str, list[int]]] = {}

    def work(c: Communicator) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY
        )
        replica = replicate(model, optimizer, c, schedule.bucket_bytes, served)
        synchronizer: Any = replica._binding.synchronizer
        if c.rank == 0:
            shards.update(owned(served, synchronizer))
        for step in range(schedule.steps):
            x, y = map(torch.from_numpy, schedule.batches[step][c.rank])
            with replica_step(replica, step, schedule.weight(step, c.rank)):
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        replica.settle()
        c.all_reduce(torch.zeros(1)).wait("the meeting")
        synchronizer.settle(Weights.MERGED)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        replica.drain()
        replica.close()
        return state

    first, *others = run_ranks(schedule.workers, work)
    served.join()
    for entry in served.order:
        assert served.order.count(entry) == 1
    assert len(served.order) == len(shards) * schedule.workers * schedule.steps
    expected = asynchronously_modelled(schedule, served.order, shards, scales_rate)
    for name, value in expected.items():
        np.testing.assert_allclose(first[name].numpy(), value, rtol=0, atol=1e-10)
    for other in others:
        assert largest_difference(first, other) == 0


def owned(served: Served, synchronizer: Any) -> dict[tuple[int, int], dict[str, list[int]]]:
    """Return which flat values of each parameter a server owns, by server and bucket."""
    found: dict[tuple[int, int], dict[str, list[int]]] = {}
    for number, server in enumerate(served.running):
        for bucket in synchronizer.buckets:
            places = [
                (name, place)
                for name, p in zip(bucket.names, bucket.parameters, strict=True)
                for place in range(p.numel())
            ]
            values: dict[str, list[int]] = {}
            for name, place in places[server._server.shard(bucket.index)]:
                values.setdefault(name, []).append(place)
            found[number, bucket.index] = values
    return found


def asynchronously_modelled(
    schedule: Schedule,
    order: Sequence[tuple[int, int, int, int]],
    shards: Mapping[tuple[int, int], dict[str, list[int]]],
    scales_rate: bool,
) -> Values:
    """Train by NumPy, each shard's updates in the order of arrival; return the parameters."""
    present = {name: p.detach().numpy().copy() for name, p in layers().named_parameters()}
    momenta: Values = {}
    read = [
        {name: value.copy() for name, value in present.items()} for _ in range(schedule.workers)
    ]
    gradients: dict[tuple[int, int], Values] = {}
    queues = {key: [entry[2:] for entry in order if entry[:2] == key] for key in shards}
    updates = dict.fromkeys(shards, 0)
    returned = {(key, worker): 0 for key in shards for worker in range(schedule.workers)}
    made = dict.fromkeys(returned, 0)

    def gradient(worker: int, version: int) -> Values | None:
        """Return a push's gradients, once all servers have made the worker's last push."""
        if (worker, version) not in gradients:
            if any(made[key, worker] < version - 1 for key in shards):
                return None
            batch = schedule.batches[version - 1][worker]
            gradients[worker, version] = gradients_of(read[worker], *batch)
        return gradients[worker, version]

    while any(queues.values()):
        before = sum(map(len, queues.values()))
        for key, queue in queues.items():
            while queue and (found := gradient(*queue[0])) is not None:
                worker, version = queue.pop(0)
                age = updates[key] - returned[key, worker]
                rate = RATE / age if scales_rate and age > 1 else RATE
                for name, places in shards[key].items():
                    value = present[name].reshape(-1)
                    step = found[name].reshape(-1)[places] + DECAY * value[places]
                    momentum = momenta.setdefault(name, np.zeros(value.size))
                    momentum[places] = MOMENTUM * momentum[places] + step
                    value[places] -= rate * momentum[places]
                    read[worker][name].reshape(-1)[places] = value[places]
                updates[key] += 1
                returned[key, worker] = updates[key]
                made[key, worker] = version
        assert sum(map(len, queues.values())) < before, "the order is impossible"
    return present


def test_running_statistics_are_the_mean_once_a_worker_settles() -> None:
    served = Served(2, staleness=2)

    def work(c: Communicator) -> tuple[Tensor, Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = replicate(model, optimizer, c, 10**9, served)
        own = torch.zeros(4, dtype=torch.float64)
        for step in range(5):
            x = torch.full((3, 4), float(c.rank + step), dtype=torch.float64)
            with replica_step(replica, step, 0.5):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            own = 0.9 * own + 0.1 * x[0]
        replica.settle()
        mean = model[0].running_mean.clone()  # type: ignore[union-attr, operator]
        replica.drain()
        replica.close()
        return own, mean

    results = run_ranks(2, work)
    expected = sum(own for own, _ in results) / 2
    for own, mean in results:
        torch.testing.assert_close(mean, expected)
        assert not torch.allclose(own, expected)


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


def test_a_parameter_that_an_asynchronous_worker_writes_before_a_meeting_is_refused() -> None:
    def work(rank: Rank) -> None:
        rank.train(0)
        rank.replica.settle()
        rank.model.get_parameter("6.bias").data.mul_(0.5)
        with pytest.raises(ConfigError, match="asynchronous workers must not write them"):
            rank.replica._binding.synchronizer.settle(Weights.MERGED)

    on_workers(work, staleness=None)


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
