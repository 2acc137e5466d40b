"""Weight averaging twice: by plain torch, one worker after another, and by ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from paceline.algorithms.average import Averaging
from paceline.algorithms.method import Method
from paceline.algorithms.open_average import open_average, size_of_buckets
from paceline.algorithms.open_exchange import PutOptions
from paceline.comm.communicator import Communicator
from paceline.reduce.buckets import Bucket
from paceline.replica.replica import Replica
from paceline.update.batch_norm import RunningStatistics
from paceline.update.outer.average import Average
from paceline.update.outer.fragments import cut_into_fragments
from tests.harness.equivalence.given_builder import GivenBuilder
from tests.harness.equivalence.put_synchronizers import ServerThread, notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.worlds import run_of

State = dict[str, Tensor]
_random = Lock()


def net() -> nn.Module:
    """Make a small net in float64, with running statistics."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 7), nn.Linear(7, 4)]
    return nn.Sequential(*layers).double()


def momentum_sgd(model: nn.Module) -> Optimizer:
    """Make an optimizer with a state."""
    return SGD(model.parameters(), lr=0.2, momentum=0.8, nesterov=True)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained.

    Attributes:
        average: how weights are averaged.
        cuts: of each step's batch, one more than workers; equal ones are empty shares.
        make_model: makes the model.
        make_optimizer: makes each worker's optimizer.
        machines: how many workers each machine has; by default one.
        wire: the codec between machines.
        dtype: of the model.
        momenta: the entries of the optimizer's state that are averaged, and what an update
            multiplies them by.
    """

    average: Average
    cuts: Sequence[Sequence[int]]
    make_model: Callable[[], nn.Module] = net
    make_optimizer: Callable[[nn.Module], Optimizer] = momentum_sgd
    machines: Sequence[int] = ()
    wire: str = "fp32"
    dtype: torch.dtype = torch.float64
    momenta: Mapping[str, float] = field(default_factory=lambda: {"momentum_buffer": 0.8})

    @property
    def workers(self) -> int:
        """Count the workers."""
        return len(self.cuts[0]) - 1

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return a step's global batch."""
        generator = torch.Generator().manual_seed(step)
        size = self.cuts[step][-1]
        x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        return x.to(self.dtype), torch.randint(0, 4, (size,), generator=generator)

    def train(self, model: nn.Module, optimizer: Optimizer, step: int, worker: int) -> None:
        """Make a worker's local step, unless its share is empty."""
        x, y = self.batch(step)
        a, b = self.cuts[step][worker : worker + 2]
        if a < b:
            F.cross_entropy(model(x[a:b]), y[a:b]).backward()
            optimizer.step()
            optimizer.zero_grad()


def cuts(steps: int, workers: int, *, seed: int = 0, size: int = 12) -> list[list[int]]:
    """Cut each step's batch at random, so that some shares are empty; the last batch is short."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(steps):
        count = size if step + 1 < steps else size // 2
        inner = torch.randint(0, count // 2 + 1, (workers - 1,), generator=generator) * 2
        found.append([0, *sorted(inner.tolist()), count])
    return found


@dataclass
class _Merged:
    """A fragment of the reference: its names, and what the workers agreed on."""

    names: list[str]
    anchor: Tensor
    outer: dict[str, Tensor]
    samples: list[int]
    taken: list[Tensor] = field(default_factory=list)  # by worker, while a merge is under way
    momenta: list[dict[str, list[Tensor]]] = field(default_factory=list)  # the same
    mean: Tensor | None = None
    taken_after: int = 0
    weights: list[float] = field(default_factory=list)


def by_plain_torch(task: Task, fragments: Sequence[Sequence[str]]) -> tuple[State, list[State]]:
    """Train all workers one after another; return the merged weights, and each worker's own.

    Args:
        task: what is trained.
        fragments: the parameters of each.
    """
    models = [task.make_model() for _ in range(task.workers)]
    optimizers = [task.make_optimizer(model) for model in models]
    rule = task.average.rule.for_workers(task.workers)
    schedule = task.average.schedule(len(task.cuts))

    def flat(model: nn.Module, names: Sequence[str]) -> Tensor:
        own = dict(model.named_parameters())
        return torch.cat([own[name].detach().flatten() for name in names])

    parts = []
    for names in fragments:
        anchor = flat(models[0], names)
        parts.append(_Merged(list(names), anchor, rule.begin(anchor), [0] * task.workers))
    statistics = [name for name, b in models[0].named_buffers() if b.is_floating_point()]

    def write(model: nn.Module, names: Sequence[str], values: Tensor) -> None:
        own = dict(model.named_parameters())
        for name, part in zip(names, values.split([own[n].numel() for n in names]), strict=True):
            own[name].data.copy_(part.view_as(own[name]))

    def momenta(worker: int, names: Sequence[str]) -> dict[str, list[Tensor]]:
        """Copy a worker's momenta, by entry and name; zeros where there are none."""
        own, state = dict(models[worker].named_parameters()), optimizers[worker].state
        return {
            entry: [state[own[n]].get(entry, torch.zeros_like(own[n])).clone() for n in names]
            for entry in task.momenta
        }

    def apply_momenta(part: _Merged, late: int) -> None:
        for model, optimizer, taken in zip(models, optimizers, part.momenta, strict=True):
            own = dict(model.named_parameters())
            for (entry, decay), k in product(task.momenta.items(), range(len(part.names))):
                each = zip(part.weights, part.momenta, strict=True)
                mean = sum((w * m[entry][k] for w, m in each), torch.zeros(()))
                state = optimizer.state[own[part.names[k]]]
                if entry not in state:
                    state |= {"step": torch.tensor(1.0)} if "exp_avg" in task.momenta else {}
                    state[entry] = torch.zeros_like(own[part.names[k]])
                state[entry] += decay**late * (mean - taken[entry][k])

    def take(number: int, step: int) -> None:
        part = parts[number]
        total = sum(part.samples)
        part.taken = [flat(model, part.names) for model in models]
        shares = zip(part.taken, part.samples, strict=True)
        part.mean = sum((n / total * own for own, n in shares), torch.zeros_like(part.anchor))
        if not number:
            for name in statistics:
                values = [dict(m.named_buffers())[name].clone() for m in models]
                each = zip(values, part.samples, strict=True)
                means[name] = sum((n / total * v for v, n in each), torch.zeros_like(values[0]))
        if task.average.momenta == "average":
            part.momenta = [momenta(worker, part.names) for worker in range(task.workers)]
        part.weights = [n / total for n in part.samples]
        part.samples, part.taken_after = [0] * task.workers, step

    def apply(number: int, step: int) -> None:
        part = parts[number]
        assert part.mean is not None
        late = step - 1 - part.taken_after
        for model, taken in zip(models, part.taken, strict=True):
            own, anchor, outer = rule.merge(taken, part.anchor, part.mean, part.outer)
            now, mix = flat(model, part.names), task.average.mix
            if late:
                own = own + now - taken if mix is None else mix * now + (1 - mix) * own
            write(model, part.names, own)
            for name in () if late or number else statistics:
                dict(model.named_buffers())[name].copy_(means[name])
        if part.momenta:
            apply_momenta(part, late)
        part.anchor, part.outer, part.mean = anchor, outer, None
        if not number:
            merged_statistics.update(means)

    means: State = {}
    merged_statistics = {name: dict(models[0].named_buffers())[name] for name in statistics}
    for step, step_cuts in enumerate(task.cuts):
        for number in schedule.applied_before(step):
            apply(number, step)
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            task.train(model, optimizer, step, worker)
            for part in parts:
                part.samples[worker] += step_cuts[worker + 1] - step_cuts[worker]
        for number in schedule.taken_after(step):
            if parts[number].mean is not None:
                apply(number, step + 1)
            take(number, step)
    for number, part in enumerate(parts):
        if part.mean is not None:
            apply(number, len(task.cuts))
    result = {}
    for part in parts:
        sizes = [dict(models[0].named_parameters())[name].numel() for name in part.names]
        result |= dict(zip(part.names, part.anchor.split(sizes), strict=True))
    result |= merged_statistics
    return result, [dict(model.named_parameters()) for model in models]


class Worker:
    """A rank's replica, whose steps are those of a task."""

    def __init__(self, task: Task, communicator: Communicator, make: Callable[..., Any]) -> None:
        self.task, self.rank = task, communicator.rank
        with _random:  # which is the process's
            self.model = task.make_model().to(task.dtype)
        self.optimizer = task.make_optimizer(self.model)
        self.fragments: list[list[str]] = []

        def make_method(buckets: Sequence[Bucket]) -> Method:
            forward = list(reversed(buckets))
            sizes = [sum(p.nbytes for p in bucket.parameters) for bucket in forward]
            self.fragments = [
                [name for i in part for name in forward[i].names]
                for part in cut_into_fragments(sizes, task.average.fragments)
            ]
            statistics = RunningStatistics(self.model)
            average: Averaging = make(buckets, communicator, statistics, self.optimizer)
            return Method.by_rounds(average)

        size = size_of_buckets(self.model.parameters(), 300, task.average.fragments)
        builder = GivenBuilder(make_method, size, dense=True)
        self.replica = Replica(self.model, self.optimizer, run_of(communicator), builder)

    def train(self, steps: range) -> None:
        """Make steps."""
        for step in steps:
            step_cuts = self.task.cuts[step]
            share = step_cuts[self.rank + 1] - step_cuts[self.rank]
            with replica_step(self.replica, step, share / step_cuts[-1], step_cuts[-1]):
                self.task.train(self.model, self.optimizer, step, self.rank)

    def own(self) -> State:
        """Copy this worker's own weights."""
        self.model.train()
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def merged(self) -> State:
        """Copy the merged weights and statistics."""
        self.model.eval()
        return {n: v.clone() for n, v in self.model.state_dict().items() if v.is_floating_point()}


def on_ranks(
    task: Task,
    work: Callable[[Worker, Communicator], Any],
    server: ServerThread | None = None,
    *,
    faults: bool = False,
) -> list[Any]:
    """Call `work` on each rank, a thread; return the results.

    Args:
        task: what is trained.
        work: of a rank.
        server: merges; None: the ranks do among themselves.
        faults: puts are late and overtake each other.
    """
    average = task.average
    rule, schedule = average.rule.for_workers(task.workers), average.schedule(len(task.cuts))

    def kind(buckets: Any, statistics: Any, optimizer: Any, options: PutOptions) -> Averaging:
        return open_average(
            buckets,
            statistics,
            options,
            rule,
            schedule,
            fragments=average.fragments,
            mix=average.mix,
            averaged=optimizer if average.momenta == "average" else None,
            forgets=optimizer if average.momenta == "reset" else None,
        )

    make = notified(
        faults, task.machines, task.wire, kind, error_decay=rule.error_decay, server=server
    )

    def run(communicator: Communicator) -> Any:
        worker = Worker(task, communicator, make)
        try:
            result = work(worker, communicator)
            worker.replica.drain()
            return result
        finally:
            worker.replica.close()

    try:
        return run_ranks(task.workers, run)
    finally:
        if server is not None:
            server.join()
