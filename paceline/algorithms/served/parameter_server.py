"""Parameter server: owns a part of every bucket, and updates it by the workers' gradients.

    contributions of all workers ─▶ sum ─┐
    record of the version ───────────────┴─▶ torch's optimizer ─▶ parameters to all workers

The sums, the updates and what returns pass through the owner's thread of `ShardServer`. Messages of
the workers pass through the thread that calls `serve`.

Asynchronous workers have an exchange each, of one worker and all servers. A server then has a
`ParameterServer` for each worker, and these share the shards: each push is an update of its own, in
the order of arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.algorithms.served.records import (
    Kind,
    StepRecord,
    content_of,
    parameter_key,
    ranges_within,
    served_buckets,
    shard_bounds,
    to_message,
    worker_bounds,
)
from paceline.comm.peer_activities import Timeout
from paceline.comm.window import Window
from paceline.errors import CommError
from paceline.reduce.put_engine.layout import Layout
from paceline.reduce.put_engine.messages import Messages
from paceline.reduce.put_engine.shard_server import ShardServer
from paceline.reduce.rank_state import Ranges
from paceline.update.owned_shards import OwnedShards
from paceline.update.updater import StepHyperparameters


@dataclass(frozen=True, kw_only=True)
class _StateCopy:
    """Copy of the optimizer's state of this server's shards, between two updates.

    Attributes:
        parts: each worker's part of the state, by the worker.
        fetches: how often each worker has fetched its part.
    """

    parts: dict[int, Ranges]
    fetches: dict[int, int]


class ParameterServer:
    """Parameter server of the workers of one exchange.

    Args:
        window: the server's window, reserved for this exchange.
        layout: layout of the window.
        timeout: timeout of each wait for a worker that has asked for something.
        shared: the shards that the servers of asynchronous workers share; None: this one's.
        scales_rate: whether an update by gradients that are s > 1 updates old has 1/s of its rate
            (Zhang et al., "Staleness-aware async-SGD", IJCAI 2016).

    Attributes:
        staleness: histogram of an asynchronous worker's gradients of buckets: how often they were
            so many updates old, by this number; since the worker last asked for it.
    """

    def __init__(
        self,
        window: Window,
        layout: Layout,
        timeout: Timeout,
        shared: OwnedShards | None = None,
        *,
        scales_rate: bool = False,
    ) -> None:
        self._layout = layout
        self._rank = window.rank
        self._workers = layout.topology.contributors if layout.has_messages else ()
        self._buckets = served_buckets(layout)
        self._server = ShardServer(window, layout)
        self._messages = Messages(window, layout, timeout)
        self._shares = shared is not None
        self._scales_rate = scales_rate
        self._shards = OwnedShards() if shared is None else shared
        with self._shards.lock:
            self._add_shards()
        self.staleness: Counter[int] = Counter()
        self._returned: Counter[int] = Counter()  # by bucket: updates before the last return
        self._restored = 0  # how often the workers have restored the state
        self._optimizer: Optimizer | None = None
        self._version = 0  # of the last record
        self._values: dict[int, Tensor] = {}  # new parameters of the next version, by bucket
        self._copies: dict[int, _StateCopy] = {}  # by the number of updates
        self._given: dict[int, Ranges] = {}  # by worker, its part of the next update's state

    def _add_shards(self) -> None:
        for bucket in self._buckets:
            index = bucket.index
            if index not in self._shards.fragments:
                lengths = bucket.spec.lengths
                names = [parameter_key(index, number) for number in range(len(lengths))]
                sums = self._server.sums(index, 0)
                self._shards.add(
                    index, names, lengths, self._server.shard(index), sums.new_empty(len(sums))
                )

    @property
    def versions(self) -> list[int]:
        """For each bucket, the number of its versions that have returned."""
        return self._server.versions

    @property
    def nbytes(self) -> int:
        """The bytes of all buckets."""
        return self._server.nbytes

    def serve(self, check: Callable[[], None] = lambda: None) -> None:
        """Return once all workers have announced their end; `release` lets them end.

        Args:
            check: called every half second or more often; what it raises ends the wait.

        Raises:
            PeerLost: a worker's connection ended before.
            CommError: a worker sent what doesn't belong to the run.
        """

        def look() -> None:
            check()
            self._take_messages()

        self._server.serve(look)

    def release(self) -> None:
        """Let the workers end, which wait for it; return once one of them does."""
        self._server.release()

    def close(self) -> None:
        """End the thread, and the window."""
        self._server.close()

    def _take_messages(self) -> None:
        for worker in self._workers:
            while (message := self._messages.arrived(worker)) is not None:
                self._take(worker, message)
                self._messages.acknowledge(worker)

    def _take(self, worker: int, message: bytes) -> None:
        kind = message[0]
        if kind == Kind.RECORD:
            self._take_record(StepRecord.from_message(message))
        elif kind == Kind.VALUES:
            self._values = content_of(message)
        elif kind == Kind.STATE:
            self._restore(worker, *content_of(message))
        elif kind == Kind.FETCH:
            self._send_state(worker, content_of(message))
        elif kind == Kind.STALENESS:  # the owner's thread is idle: the worker has all updates
            counts = to_message(Kind.STALENESS, dict(self.staleness))
            self.staleness.clear()
            self._messages.send(worker, counts, "the staleness of gradients")
        else:
            raise CommError(f"Worker {worker} sent a message of the unknown kind {kind}.")

    def _restore(self, worker: int, updates: int, state: Ranges) -> None:
        """Take a worker's part of the optimizer's state, with which the next update begins.

        The other workers may have given theirs, or are still to give it. Each asynchronous worker
        gives the whole state: the shards take the first one's.
        """
        with self._shards.lock:
            if not self._shares:
                self._given[worker] = state
                if updates in self._copies:
                    self._copies[updates].parts[worker] = state
                return
            self._restored += 1
            if self._restored > self._shards.restored:
                self._shards.restore([state])
                self._shards.restored = self._restored

    def _take_record(self, record: StepRecord) -> None:
        """Let a version return, as its record says."""
        if record.version != self._version + 1:
            raise CommError(
                f"The workers' record of version {record.version} came after that of version "
                f"{self._version}."
            )
        self._version = record.version
        step = record.hyperparameters
        if step is not None and self._optimizer is None:
            self._optimize(record)
        for bucket in self._buckets:
            new = self._values.pop(bucket.index, None)
            arguments = bucket.index, record.version, new
            update = None
            if step is not None:
                update = partial(self._update, *arguments, step)
            elif record.pulls:
                update = partial(self._pull, *arguments)
            self._server.return_version(bucket.index, record.version, update)

    def _optimize(self, record: StepRecord) -> None:
        kind: Any = record.kind
        self._optimizer = optimizer = kind([nn.Parameter(self._server.sums(0, 0).new_empty(0))])
        with self._shards.lock:
            for bucket, param_group in zip(self._buckets, record.param_groups, strict=True):
                self._shards.optimize(bucket.index, optimizer, param_group)

    def _update(
        self, index: int, version: int, new: Tensor | None, step: StepHyperparameters
    ) -> None:
        """Update a bucket's shard, in the owner's thread."""
        used = self._server.flags(index, version).tolist()
        with self._shards.lock:
            self._shards.restore(list(self._given.values()))
            self._given.clear()
            self._take_values(index, new)
            self._shards.freeze(index, self._scaled(index, step))
            self._shards.update(index, self._server.sums(index, version), used)
            self._returned[index] = self._shards.updates[index]

    def _scaled(self, index: int, step: StepHyperparameters) -> StepHyperparameters:
        """Count a bucket's staleness; return the step's hyperparameters, scaled by it if asked."""
        if not self._shares:
            return step
        staleness = self._shards.updates[index] - self._returned[index]
        self.staleness[staleness] += 1
        if not self._scales_rate or staleness <= 1:
            return step
        groups = tuple({**group, "lr": group["lr"] / staleness} for group in step.groups)
        return replace(step, groups=groups)

    def _take_values(self, index: int, new: Tensor | None) -> None:
        """Take new parameters; asynchronous workers begin equal: until the first update alone."""
        if new is not None and not (self._shares and self._shards.updates[index]):
            self._shards.take_values(index, new)

    def _pull(self, index: int, version: int, new: Tensor | None) -> None:
        """Return a bucket's present parameters, in the owner's thread."""
        with self._shards.lock:
            self._take_values(index, new)
            self._shards.read(index, self._server.sums(index, version))
            self._returned[index] = self._shards.updates[index]

    def _send_state(self, worker: int, updates: int) -> None:
        """Send a worker its part of the optimizer's state after so many updates.

        Worker 0 asks before its record lets the next update begin. The others get theirs from the
        same copy, however late they ask.
        """
        if updates not in self._copies:
            self._copies[updates] = self._copy_state()
        copy = self._copies[updates]
        self._messages.send(
            worker, to_message(Kind.STATE, copy.parts[worker]), "the optimizer's state"
        )
        copy.fetches[worker] += 1
        if len(set(copy.fetches.values())) == 1:
            del self._copies[updates]

    def _copy_state(self) -> _StateCopy:
        bounds = shard_bounds(self._layout, self._rank)
        with self._shards.lock:
            state = ranges_within(self._shards.local(), bounds)
            parts = {
                worker: ranges_within(state, worker_bounds(self._layout, worker))
                for worker in self._workers
            }
            return _StateCopy(parts=parts | self._given, fetches=dict.fromkeys(self._workers, 0))
