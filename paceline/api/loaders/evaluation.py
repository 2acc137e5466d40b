"""Evaluation that outlives lost ranks: what a lost rank had to evaluate, the others do as well.

    each rank        its samples of each global batch
    all ranks        a sum: which samples have been evaluated by ranks that live?
    each rank        its part of the missing samples; then a sum again, until none is missing

What a rank has evaluated stays in the sums of the script, so that it isn't evaluated again. What a
lost rank has evaluated is lost with it. A rank that learns at the begin of a loss that the others
learn of at the end has evaluated nothing yet: its samples are missing, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import torch

from paceline.api.loaders.stream_loader import CurrentBatch
from paceline.api.rollback import Outcome
from paceline.api.script_loop import ScriptLoop
from paceline.comm.communicator import gather_bytes, require_same_call, total
from paceline.data.map_style_loader import MappedLoader
from paceline.data.order import Indices, Order
from paceline.errors import CommError
from paceline.generation.run import Run

_CALL = "world.evaluation()"
_WHAT = f"{_CALL}, which all ranks must iterate to its end"


class Evaluation:
    """Evaluation of a data set by all ranks, which continues where one of them is lost.

    Args:
        loop: the script's loop, which enters the next generation.
        mapped: loads the samples.
        current: notes each batch before it is yielded.
    """

    def __init__(
        self,
        loop: ScriptLoop,
        run: Run,
        mapped: MappedLoader,
        order: Order,
        current: CurrentBatch,
    ) -> None:
        self._loop = loop
        self._run = run
        self._mapped = mapped
        self._order = order
        self._current = current
        self._done = np.zeros(order.samples, dtype=np.int64)  # 1: this rank has evaluated it

    def batches(self) -> Iterator[Any]:
        """Yield the batches of this rank, and its part of those of lost ranks. All ranks call it.

        Raises:
            ConfigError: a step is active, or another rank makes another call or has other data.
            CommError: a peer is lost, and the others can't continue from here, or it is silent.
        """
        with self._run.context.activities.call(_CALL):
            end, begins = self._loop.begin_evaluation(_CALL)
        with self._loop.meters.evaluate():
            for place, batch in self._mapped.epoch(0) if begins else ():
                if place.count:
                    self._current._note(place.step, place.count)
                    yield batch
                    self._done[place.first : place.last] = 1
            if end is None:  # the loop goes back, and repeats this evaluation
                self._loop.meters.merged = True
                return
            while (missing := self._missing(end)).size:
                yield from self._batches_of(self._part(missing))

    def _batches_of(self, positions: Indices) -> Iterator[Any]:
        size = -(-self._order.batch_size // self._run.rank_and_size()[1])
        parts = [positions[at : at + size] for at in range(0, len(positions), size)]
        with closing(self._mapped.samples(0, parts)) as batches:
            for part, batch in zip(parts, batches, strict=True):
                self._current._note(int(part[0]) // self._order.batch_size, len(part))
                yield batch
                self._done[part] = 1

    def _part(self, missing: Indices) -> Indices:
        """Return this rank's part of some positions, which is contiguous."""
        rank, world_size = self._run.rank_and_size()
        return np.array_split(missing, world_size)[rank]

    def _missing(self, end: int) -> Indices:
        """Return the positions that no rank of this generation has evaluated; collective.

        Where none is missing, the meters' sums are those of all ranks.

        Args:
            end: the place of the evaluation's end.
        """
        rollback = self._loop.rollback
        meters = self._loop.meters
        with self._run.context.activities.call(f"the end of {_CALL}"):
            while rollback.reach(end):
                try:
                    communicator = self._run.context.group("data", "steps")
                    form = f"{len(self._done)} samples"
                    remedy = "pass loaders of the same data set"
                    require_same_call(communicator, _CALL, form, _WHAT, remedy=remedy)
                    everywhere = total(communicator, torch.from_numpy(self._done), _WHAT)
                    missing = np.flatnonzero(everywhere.numpy() == 0)
                    if not missing.size:
                        meters.merge(gather_bytes(communicator, meters.pack(), _WHAT))
                        merged = torch.frombuffer(bytearray(meters.pack()), dtype=torch.uint8)
                        rollback.outcome = Outcome(end, merged)
                    return missing
                except CommError as error:
                    rollback.require_here(error)
        outcome = rollback.outcome  # another rank knows that none is missing
        assert outcome is not None
        assert outcome.place == end
        meters.merge([outcome.value.numpy().tobytes()])
        return np.empty(0, dtype=np.int64)
