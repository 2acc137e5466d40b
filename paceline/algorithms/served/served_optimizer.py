"""Optimizer of a worker whose parameters servers update: its state is theirs.

Each worker gives the servers a part of the state when parameters are bound or a state is loaded,
and fetches that part for snapshots and checkpoints. Of all workers of an exchange, the first alone
sends parameters and hyperparameters: the servers use worker 0's, or each asynchronous worker's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.algorithms.served.records import (
    Kind,
    StepRecord,
    content_of,
    parameter_key,
    ranges_within,
    shard_bounds,
    to_message,
    worker_bounds,
)
from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket
from paceline.reduce.put_engine.layout import Layout
from paceline.reduce.put_engine.messages import Messages
from paceline.reduce.rank_state import Ranges, append_ranges
from paceline.update.divided_optimizer import DividedOptimizer, Division, cut_state, flat_of
from paceline.update.parameter_writes import ParameterWrites
from paceline.update.updater import StepHyperparameters

SERVED = Division(
    flag="{--sync} server",
    argument="sync='server'",
    where="the servers own",
    other_flag="{--sync} notified",
    other_argument="sync='notified'",
)
_STATE = "the exchange of the optimizer's state with the servers"
_STALENESS = "the staleness of gradients"
_RECORD = "a step's record to the servers"


class ServedOptimizer(DividedOptimizer):
    """Optimizer of a worker: servers have its state, and update by its hyperparameters.

    Args:
        optimizer: the user's optimizer, whose class and hyperparameters the servers use.
        buckets: all buckets.

    Raises:
        ConfigError: as `DividedOptimizer`.
    """

    def __init__(self, optimizer: Optimizer, buckets: Sequence[Bucket]) -> None:
        super().__init__(optimizer, buckets, SERVED)
        self._parameters = {
            parameter_key(bucket.index, index): (name, p)
            for bucket in buckets
            for index, (name, p) in enumerate(zip(bucket.names, bucket.parameters, strict=True))
        }
        self._writes = ParameterWrites(buckets)
        self._messages: Messages | None = None

    def connect(self, messages: Messages) -> None:
        """Give the servers the optimizer's present state, each worker a part of it.

        Raises:
            CommError: a server was lost, or silent; so do all methods that send messages.
        """
        self._messages = messages
        self.divide_state()

    @property
    def layout(self) -> Layout:
        """The layout of the window over which it is connected."""
        return self._connected.layout

    @property
    def is_first(self) -> bool:
        """Whether this worker is the first of its exchange, whose parameters the servers take."""
        return self._connected.rank == self._connected.layout.topology.contributors[0]

    def let_return(
        self,
        version: int,
        step: StepHyperparameters | None,
        behind: Sequence[Bucket] = (),
        *,
        pulls: bool = False,
    ) -> None:
        """Let the servers return a version: its sums, or parameters; the first worker alone does.

        Args:
            version: the version, the same for all buckets.
            step: the hyperparameters of the update by the sums; None: there is no update.
            behind: buckets whose newest parameters this worker hasn't installed.
            pulls: without an update the present parameters return; otherwise the sums do.

        Raises:
            ConfigError: a parameter of a bucket in `behind` was written; newer updates would undo
                that.
        """
        if not self.is_first:
            return
        record = StepRecord(
            version=version,
            optimizer=type(self._optimizer).__name__,
            param_groups=tuple(bucket.param_group for bucket in self._buckets),
            hyperparameters=step,
            pulls=pulls,
        )
        written = self._writes.written() if step is not None or pulls else []
        for bucket in written:
            if bucket in behind:
                raise ConfigError(
                    f"{bucket.names[0]}, or another parameter of its bucket, was written while "
                    "updates were still pending: with staleness > 0, call settle() before you "
                    "write parameters; asynchronous workers must not write them."
                )
            self._writes.note(bucket)
        for server in self._servers:
            if written:
                values = to_message(Kind.VALUES, self._values(written, server))
                self._connected.send(server, values, "new parameters to the servers")
            self._connected.send(server, record.to_message(), _RECORD)

    def install(self, unit: tuple[Bucket, ...], values: Sequence[Tensor | None]) -> None:
        """Copy updated parameters of a unit into the model; raises as `DividedOptimizer`."""
        super().install(unit, values)
        if self.is_first:
            for bucket in unit:
                self._writes.note(bucket)

    def local(self) -> Ranges:
        """Fetch this worker's part of the state after the same update as all other workers."""
        request = to_message(Kind.FETCH, self.update_count)
        for server in self._servers:
            self._connected.send(server, request, _STATE)
        fetched: dict[str, tuple[int, int, Any]] = {}
        for server in self._servers:  # in the order of their shards
            append_ranges(fetched, content_of(self._connected.receive(server, _STATE)))
        return {self._parameters[key][0]: entry for key, entry in fetched.items()}

    def take_staleness(self) -> Counter[int]:
        """Return how often gradients of this worker's were so many updates old, since last time."""
        found: Counter[int] = Counter()
        for server in self._servers:
            self._connected.send(server, to_message(Kind.STALENESS, None), _STALENESS)
        for server in self._servers:
            found.update(content_of(self._connected.receive(server, _STALENESS)))
        return found

    def restore_local(self, saved: Ranges) -> bool:
        """Give the servers what `local` returned, if this worker has the same part."""
        bounds = {self._parameters[key][0]: both for key, both in self._bounds.items()}
        if bounds != {name: entry[:2] for name, entry in saved.items()}:
            return False
        self._give({key: saved[self._parameters[key][0]] for key in self._bounds})
        return True

    def _take(self, state: Mapping[Tensor, Any]) -> None:
        part = {}
        for key, (start, stop) in self._bounds.items():
            _, p = self._parameters[key]
            part[key] = start, stop, cut_state(state.get(p, {}), p, start, stop)
        self._give(part)

    def _give(self, part: Ranges) -> None:
        """Give the servers this worker's part of the state; return once they have taken it."""
        layout = self._connected.layout
        for server in self._servers:
            within = ranges_within(part, shard_bounds(layout, server))
            given = to_message(Kind.STATE, (self.update_count, within))
            self._connected.send(server, given, _STATE)
        for server in self._servers:
            self._connected.wait_handled(server, _STATE)

    def _values(self, written: Sequence[Bucket], server: int) -> dict[int, Tensor]:
        """Return a server's shards of the parameters of some buckets, by bucket."""
        bounds = shard_bounds(self._connected.layout, server)
        shards = {}
        for bucket in written:
            pieces = [
                flat_of(p)[slice(*bounds[key])]
                for index, p in enumerate(bucket.parameters)
                if (key := parameter_key(bucket.index, index)) in bounds
            ]
            if pieces:
                shards[bucket.index] = torch.cat(pieces).cpu()
        return shards

    @property
    def _connected(self) -> Messages:
        assert self._messages is not None
        return self._messages

    @property
    def _servers(self) -> Sequence[int]:
        """The servers, which exchange no messages where all parameters are frozen."""
        layout = self._connected.layout
        return layout.topology.owners if layout.has_messages else ()

    @property
    def _bounds(self) -> Mapping[str, tuple[int, int]]:
        """The part of the state that this worker fetches and gives."""
        return worker_bounds(self._connected.layout, self._connected.rank)
