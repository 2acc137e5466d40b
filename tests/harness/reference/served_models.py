"""SGD by parameter servers in NumPy, given what each worker read, or the order of pushes.

Both train two linear layers on the mean of squares, with momentum and weight decay:

    SSP (Ho et al., 2013)     each gradient is one at the versions that its worker has read
    asynchronous SGD          each owner's updates are made in the order in which pushes arrived
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

RATE, MOMENTUM, DECAY = 0.01, 0.9, 0.01
Array = NDArray[np.float64]
Values = dict[str, Array]
Batch = tuple[Array, Array]
Shard = tuple[int, int]
"""A server and a bucket."""

Places = Mapping[Shard, Mapping[str, Sequence[int]]]
"""The flat values of each parameter in a shard."""


@dataclass
class Trained:
    """Parameters and momenta between two steps."""

    values: Values
    momenta: Values = field(default_factory=dict)

    def copy(self) -> Trained:
        return copy.deepcopy(self)


def gradients_of(read: Values, x: Array, y: Array) -> Values:
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


class StaleModel:
    """SSP from some parameters on: a version is the sum of all workers' gradients of a step.

    Args:
        start: version 0.
    """

    def __init__(self, start: Trained) -> None:
        self._versions = [start]

    def step(self, slices: Sequence[Batch], reads: Sequence[Mapping[str, int]]) -> None:
        """Make a step.

        Args:
            slices: of the batch, one a worker.
            reads: the version of each parameter that a worker read.
        """
        last = self._versions[-1]
        total = {name: DECAY * value for name, value in last.values.items()}
        samples = sum(len(x) for x, _ in slices)
        for (x, y), versions in zip(slices, reads, strict=True):
            read = {name: self._versions[v].values[name] for name, v in versions.items()}
            for name, gradient in gradients_of(read, x, y).items():
                total[name] += len(x) / samples * gradient
        momenta = {n: MOMENTUM * last.momenta.get(n, 0.0) + value for n, value in total.items()}
        values = {name: value - RATE * momenta[name] for name, value in last.values.items()}
        self._versions.append(Trained(values, momenta))

    @property
    def last(self) -> Trained:
        """The last version."""
        return self._versions[-1]


@dataclass(frozen=True)
class Push:
    """Push of a worker's gradients of a step to one shard."""

    shard: Shard
    worker: int
    step: int


class AsynchronousModel:
    """Asynchronous SGD between two barriers, at which all workers have read the same parameters.

    Args:
        start: what they have read.
        places: the shards.
        batches: returns a worker's samples of a step.
        scales_rate: whether a push that is s > 1 updates old has 1/s of the rate.
    """

    def __init__(
        self,
        start: Trained,
        places: Places,
        batches: Callable[[int, int], Batch],
        *,
        scales_rate: bool,
    ) -> None:
        self._present = start.copy()
        self._places = places
        self._batches = batches
        self._scales_rate = scales_rate

    def train(self, order: Sequence[Push], first: int, workers: int) -> Trained:
        """Make the updates, each shard's in this order; return the result.

        Args:
            order: the pushes.
            first: the first step of all.
            workers: their number.
        """
        self._read = [copy.deepcopy(self._present.values) for _ in range(workers)]
        self._updates = dict.fromkeys(self._places, 0)
        self._returned = {(s, w): 0 for s in self._places for w in range(workers)}
        self._made = dict.fromkeys(self._returned, first)  # the worker's next step
        self._gradients: dict[tuple[int, int], Values] = {}
        queues = {shard: [push for push in order if push.shard == shard] for shard in self._places}
        while any(queues.values()):
            before = sum(map(len, queues.values()))
            for queue in queues.values():
                while queue and (found := self._gradient(queue[0])) is not None:
                    self._update(queue.pop(0), found)
            assert sum(map(len, queues.values())) < before, "the order is impossible"
        return self._present

    def _gradient(self, push: Push) -> Values | None:
        """Return a push's gradients, once all servers have made the worker's last push."""
        key = push.worker, push.step
        if key not in self._gradients:
            if any(self._made[shard, push.worker] < push.step for shard in self._places):
                return None
            batch = self._batches(push.step, push.worker)
            self._gradients[key] = gradients_of(self._read[push.worker], *batch)
        return self._gradients[key]

    def _update(self, push: Push, gradients: Values) -> None:
        shard, worker = push.shard, push.worker
        age = self._updates[shard] - self._returned[shard, worker]
        rate = RATE / age if self._scales_rate and age > 1 else RATE
        for name, places in self._places[shard].items():
            value = self._present.values[name].reshape(-1)
            step = gradients[name].reshape(-1)[places] + DECAY * value[places]
            momentum = self._present.momenta.setdefault(name, np.zeros(value.size))
            momentum[places] = MOMENTUM * momentum[places] + step
            value[places] -= rate * momentum[places]
            self._read[worker][name].reshape(-1)[places] = value[places]
        self._updates[shard] += 1
        self._returned[shard, worker] = self._updates[shard]
        self._made[shard, worker] = push.step + 1
