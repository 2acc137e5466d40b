"""Sample position: which samples the next step of a script's loop trains.

    loader      slice ──▶ slice ──▶ slice ──▶ …         each yielded once, in the epoch's order
    steps         └─── step ─┘        └─ step …         a step trains all waiting slices

A step usually trains one batch slice. A loop that accumulates gradients over several batches trains
several. Of several models each may have steps of its own on a batch, one after another; together
they are one step of the run. Without a loader all steps are in one endless epoch, in which a rank
takes as many positions as its `samples`, or one.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

from paceline.api.cell_errors import CellErrors
from paceline.comm.communicator import gather_given
from paceline.data.batch_slice import BatchSlice
from paceline.data.drawn_order import DrawnOrder
from paceline.data.order import Order
from paceline.errors import ConfigError, many
from paceline.generation.run import Run
from paceline.snapshots.position import Position


class SamplePosition:
    """Position tracker: determines which samples each step of a script's loop trains.

    Args:
        position: the run's position, which each step advances.
        run: the run, whose ranks take samples.
        errors: detects an error that ends the loop over the loader in an interactive interpreter.

    Attributes:
        position: the run's position.
        order: the sample order of the training loader, or None.
        stream: what identifies the ranks' streams, if the training loader reads streams, or None.
        waiting: batch slices that the loader has yielded and that no step has trained yet.
        iterating: whether an iteration of the loader is in progress.
        left_early: whether the last one ended before its last batch.
        begun: whether this process has made a step or has begun an iteration of the loader.
        several: whether there are several models or optimizers, so that several steps may train a
            batch.
        saved_draw: of the checkpoint, the order that a sampler has drawn, or None.
        must_divide: whether the script has asked for that, so that the loader must divide batches.
    """

    def __init__(self, position: Position, run: Run, errors: CellErrors | None = None) -> None:
        self.position = position
        self._errors = CellErrors(interactive=False) if errors is None else errors
        self.iterating = self.left_early = False
        self.begun = self.several = False
        self.must_divide = False
        self._trained: BatchSlice | None = None  # by the last step, if another may train it too
        self._run = run
        self.order: Order | None = None
        self.waiting: list[BatchSlice] = []
        self.stream: Mapping[str, Any] | None = None
        self._saved_order: Mapping[str, Any] | None = None  # in the checkpoint
        self.saved_draw: dict[str, Any] | None = None
        self._saved_stream: Mapping[str, Any] | None = None
        self._sums: Sequence[str] | None = None  # the names of a step's sums
        self._saved_sums: Sequence[str] = ()
        self._taken = self._next_taken = 0  # positions of the endless epoch; after the next step

    @property
    def epoch(self) -> int:
        """The active epoch, or the one that the loader's next iteration begins."""
        return self.position.epoch + self.next_is_another

    @property
    def next_is_another(self) -> bool:
        """Whether the loader's next iteration begins another epoch."""
        left_by_error = self.left_early and self.unfinished
        return self.begun and not self.iterating and self.position.step > 0 and not left_by_error

    @property
    def unfinished(self) -> bool:
        """Whether an error has ended a cell of an interactive interpreter since the epoch began."""
        return self._errors.any

    @property
    def at_end(self) -> bool:
        """Whether all steps of the epoch are done."""
        if self.stream is not None:
            return self.begun and not self.iterating and not self.left_early
        return self.order is not None and self.position.step >= self.order.steps

    @property
    def repeats(self) -> bool:
        """Whether the next step trains the batch of the last one too."""
        return self.several and not self.waiting and self._trained is not None

    def discard_waiting(self) -> None:
        """Forget the slices that no step has trained, and the last one that a step has."""
        self.waiting.clear()
        self._trained = None

    def begin_iteration(self) -> None:
        """Begin an iteration of the loader, whose batches steps train.

        Collective where a sampler draws the order: all ranks then have that of the epoch.

        Raises:
            ConfigError, CommError: as `SamplerDraws.draw`.
        """
        self._trained = None
        self.begun = self.iterating = True
        self.left_early = False
        self._errors.begin()
        if isinstance(self.order, DrawnOrder):
            self.order.draws.draw(self.epoch, self._run.context.group("data", "steps"))

    def end_iteration(self, *, complete: bool) -> None:
        """End it, after the last batch or before."""
        self._trained = None
        self.iterating = False
        self.left_early = not complete

    def use_order(self, order: Order) -> None:
        """Use a loader's order from the first step on.

        Raises:
            ConfigError: there is such a loader already, steps were made without one, or the
                checkpoint has another order.
        """
        self._require_first_loader(stream=False)
        drawn = isinstance(order, DrawnOrder)
        if self._saved_order is not None and drawn is not ("source" in self._saved_order):
            now = "has" if drawn else "doesn't have"
            then = "didn't" if drawn else "did"
            raise ConfigError(
                f"the loader {now} sampler= or weights=, and that of the checkpoint {then}: pass "
                "the same arguments, or a different run= to paceline.join()."
            )
        names = {"size": "the data set's length"}
        if drawn:
            names = {"size": "the number of samples that the sampler draws"}
            names["source"] = "the data set's length"
        for name, saved in (self._saved_order or {}).items():
            own = getattr(order, name)
            subject = names.get(name, name)
            if name == "epoch_size":
                own = own is not None
                saved = saved is not None
                subject = "drop_last"
            if own != saved:
                raise ConfigError(
                    f"{subject} is {own}, but was {saved} when the checkpoint was written: pass "
                    "the same value, or a different run= to paceline.join()."
                )
        self.order = order

    def use_stream(self, facts: Mapping[str, Any]) -> None:
        """Use the ranks' own streams from the first step on.

        Args:
            facts: what the position in an epoch depends on, by the names of arguments.

        Raises:
            ConfigError: as `use_order`; facts count where the checkpoint is within an epoch.
        """
        self._require_first_loader(stream=True)
        for name, saved in (self._saved_stream or {}).items():
            if self.position.step and facts[name] != saved:
                raise ConfigError(
                    f"{name} is {facts[name]}, but was {saved} when the checkpoint was written in "
                    "the middle of an epoch, whose streams are read up to that position: use the "
                    "same value, or a different run= to paceline.join()."
                )
        self.stream = facts

    def use_sums(self, names: Sequence[str]) -> None:
        """Sum values of these names in each step, from the first one on.

        Raises:
            ConfigError: the checkpoint has sums of other names, in the middle of an epoch.
        """
        if self._sums is not None:
            return
        self._sums = names
        if self.position.step and list(self._saved_sums) != list(names):
            raise ConfigError(
                f"the meters have the sums {', '.join(names) or 'none'}, but the checkpoint, "
                "written in the middle of an epoch, has "
                f"{', '.join(self._saved_sums) or 'none'}: make the same meters, or pass a "
                "different run= to paceline.join()."
            )

    def begin_stream_epoch(self, first: int) -> int:
        """Begin an epoch of streams at step `first`; return the samples taken before it."""
        self._taken = self._taken if first else 0
        return self._taken

    def _require_first_loader(self, *, stream: bool) -> None:
        if self.order is not None or self.stream is not None:
            raise ConfigError(
                "this world already has a training loader, which defines the position of the run: "
                "pass train=False to loaders for evaluation; in a notebook, run the cell with "
                "paceline.join() again, too."
            )
        if self._taken and self._saved_stream is None:
            raise ConfigError(
                f"the run has already made {many(self.position.number, 'step')} without a loader: "
                "create the loader before the first step, or pass a different run= to "
                "paceline.join()."
            )
        if (self._saved_order if stream else self._saved_stream) is not None:
            kinds = ("a map-style data set", "an IterableDataset")
            raise ConfigError(
                f"the run's checkpoint was written with {kinds[not stream]}, but the loader has "
                f"{kinds[stream]}: pass the same kind, or a different run= to paceline.join()."
            )

    def require_all_trained(self) -> None:
        """Require at an epoch's end that steps have trained all slices.

        Raises:
            ConfigError: no step trained the last ones.
        """
        if self.waiting:
            raise ConfigError(
                f"the epoch ended with {many(len(self.waiting), 'batch')} that no world.step() "
                "used: to accumulate gradients, make a step at the last batch too (loader.step + 1 "
                "== len(loader)); if the loop doesn't train, pass train=False to the loader."
            )

    def next_slice(
        self, samples: int | None, weight: float | None
    ) -> tuple[BatchSlice, Sequence[BatchSlice]]:
        """Return the slice that the next step trains, and earlier ones that it trains too.

        Args:
            samples: the number of this rank's samples, or None; collective if it is given.
            weight: what this rank's loss is a mean over, or None: samples; collective likewise.

        Raises:
            ConfigError: no slice is waiting, or the numbers can't be used.
        """
        self.begun = True
        samples = None if samples is None else _whole(samples)
        weight = None if weight is None else _finite(weight)
        if self.must_divide:
            self._require_dividable(samples)
        if self.order is None and self.stream is None:
            return self._slice_without_loader(samples, weight), ()
        if self.repeats:
            return self._repeated(samples, weight), ()
        if not self.waiting:
            raise ConfigError(
                "world.step() was called without a batch: call it once for each batch of the "
                "loader, inside its loop; to accumulate the gradients of several backward passes "
                "in one step, use no_sync()."
            )
        *earlier, last = self.waiting
        if earlier:
            self._require_samples_on_all_ranks(last)
        if samples is None and weight is None:
            self._require_all_collated()
            return (self._accumulated(last) if earlier else last), earlier
        return self._weighted(last, samples, weight), earlier

    def _weighted(self, last: BatchSlice, samples: int | None, weight: float | None) -> BatchSlice:
        """Return a slice of the loader with the weight that the script gives, if any; collective.

        Of several batches that a step accumulates, `samples` is the sum: none counts as left out.
        """
        if samples is None and weight is None:
            return last
        if last.first == last.last:  # a placeholder, which is no sample
            samples = None if samples is None else 0
            weight = None if weight is None else 0.0
        fraction, _ = self._exchange(samples, weight)
        left_out = last.skipped
        if samples is not None and len(self.waiting) <= 1:
            left_out = max(0, last.last - last.first - samples)
        return replace(last, fraction=fraction, skipped=left_out, basis=_basis(samples, weight))

    def _require_all_collated(self) -> None:
        """Require that collation has left no sample out, where the loader's counts are used."""
        for one in self.waiting:
            if one.skipped:
                given = one.last - one.first
                raise ConfigError(
                    f"collate_fn was given {many(given, 'sample')} for step {one.number} on rank "
                    f"{one.rank}, but its batch has {one.count}: the step must know what the "
                    "loss is a mean over. Pass the number that is left, "
                    "world.step(samples=len(x)), on all ranks; for a batch that isn't made of "
                    "samples, such as packed tokens, pass world.step(weight=…)."
                )

    def _require_samples_on_all_ranks(self, last: BatchSlice) -> None:
        """Require samples on all ranks in each of several batches that a step trains."""
        if any(begin == end for each in self.waiting for begin, end in pairwise(each.cuts)):
            raise ConfigError(
                f"step {last.number} accumulates several batches, one of which has fewer samples "
                "than the ranks need: give that batch a world.step() of its own."
            )

    def _require_dividable(self, samples: int | None) -> None:
        """Require batches that Paceline's loader divides, as shares by measured speed need."""
        if samples is not None:
            raise ConfigError(
                f"world.step(samples={samples}) was called with shares='measured', with which "
                "Paceline decides how many samples each rank trains: call world.step() for the "
                "batches of paceline.loader(), or pass shares='equal' to paceline.parallelize()."
            )
        if self.order is None:
            raise ConfigError(
                "shares is 'measured', but there is no paceline.loader() of a map-style data set, "
                "whose batches Paceline could divide: create one before the first step, or pass "
                "shares='equal' to paceline.parallelize()."
            )

    def mark_trained(self, trained: BatchSlice | None = None) -> None:
        """Count the slices that `next_slice` returned as trained.

        Args:
            trained: the one of the loader's last batch; without a loader, None.
        """
        if self.stream is not None:
            self._taken = self.waiting[-1].cuts[-1] if self.waiting else self._taken
        elif self.order is None:
            self._taken = self._next_taken
        self.waiting.clear()
        self._trained = trained

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        order = None if self.order is None else self.order.facts()
        stream = {} if self.stream is None else {"stream": dict(self.stream)}
        sums = {"sums": list(self._sums)} if self._sums else {}
        drawn = {}
        if isinstance(self.order, DrawnOrder):
            drawn = {"drawn": self.order.draws.state_dict()}
        return {"taken": self._taken, "order": order, **stream, **sums, **drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._taken = state["taken"]
        self._saved_order = state["order"]
        self._saved_stream = state.get("stream")
        self._saved_sums = state.get("sums", ())
        self.saved_draw = state.get("drawn") or None

    def _repeated(self, samples: int | None, weight: float | None) -> BatchSlice:
        """Return the last step's slice, which another model's step trains too."""
        assert self._trained is not None
        return self._weighted(self._trained, samples, weight)

    def _accumulated(self, last: BatchSlice) -> BatchSlice:
        """Return one slice for all waiting ones; weight: local samples / global samples of all."""
        if self.stream is not None and any(each.weight != last.weight for each in self.waiting):
            raise ConfigError(
                f"the batches accumulated in the step that ends at position {last.last} divide "
                "their samples differently among the ranks, as at the end of a stream: give each "
                'a world.step() of its own, or pass uneven="shortest" and drop_last=True.'
            )
        if self.must_divide and any(_parts(each) != _parts(last) for each in self.waiting):
            raise ConfigError(
                f"the batches accumulated in the step that ends at position {last.last} divide "
                "their samples differently among the ranks, as a short last batch does with "
                "shares='measured': give it a world.step() of its own, or pass drop_last=True to "
                "paceline.loader()."
            )
        local = sum(each.count for each in self.waiting)
        return replace(last, fraction=local / sum(each.global_count for each in self.waiting))

    def _slice_without_loader(self, samples: int | None, weight: float | None) -> BatchSlice:
        """Return this rank's positions of the endless epoch; ranks take them in rank order."""
        if self._saved_order is not None or self._saved_stream is not None:
            raise ConfigError(
                "the run's checkpoint was written with a training loader, but this script has "
                "none: create the loader before the first step, or pass a different run= to "
                "paceline.join()."
            )
        rank, world_size = self._run.rank_and_size()
        counts = [1] * world_size
        fraction = None
        if samples is not None or weight is not None:
            fraction, given = self._exchange(samples, weight)
            counts = counts if samples is None else given
        number = self.position.number
        cuts = tuple(accumulate(counts, initial=self._taken))
        self._next_taken = cuts[-1]
        return BatchSlice(
            epoch=0,
            step=number,
            steps=number + 1,
            rank=rank,
            cuts=cuts,
            fraction=fraction,
            basis=_basis(samples, weight),
        )

    def _exchange(self, samples: int | None, weight: float | None) -> tuple[float, list[int]]:
        """Return this rank's weight of all ranks' 1, and their numbers of samples; collective.

        Raises:
            ConfigError: some ranks give `samples` or `weight` and others don't, or all give 0.
        """
        own = [_NOT_GIVEN if one is None else float(one) for one in (samples, weight)]
        given = "samples" if weight is None else "weight"
        what = "the ranks' samples= and weight= of world.step()"
        remedy = "Give samples= or weight= on all ranks in the same steps, or on none."
        context = self._run.context
        communicator = context.group("data", "steps")
        rows = [own]
        if communicator.world_size > 1:
            with context.activities.call(f"world.step({given}=…)", remedy=remedy):
                texts = gather_given(communicator, "world.step()", json.dumps(own), what)
                rows = [json.loads(text) for text in texts]
        counts = [row[0] for row in rows]
        weights = [row[1] for row in rows]
        for name, values in (("samples", counts), ("weight", weights)):
            ranks = [rank for rank, value in enumerate(values) if value == _NOT_GIVEN]
            if 0 < len(ranks) < len(values):
                raise ConfigError(
                    f"world.step() got {name}= on some ranks, but not on rank {ranks[0]}: give it "
                    "on all ranks, 0 where a rank has nothing to train, or on none."
                )
        of_ranks = counts if weight is None else weights
        total = math.fsum(of_ranks)
        if not total:
            raise ConfigError(
                f"{given} is 0 on all ranks: a mean over nothing has no gradient. Leave such a "
                "batch out on all ranks: call no world.step() for it."
            )
        return of_ranks[self._run.rank_and_size()[0]] / total, [int(count) for count in counts]


_NOT_GIVEN = -1.0  # what a rank sends in place of a number


def _basis(samples: int | None, weight: float | None) -> str:
    """Return the name of what defines a slice's weight; "" if the loader does."""
    if weight is not None:
        return "weight"
    return "" if samples is None else "samples"


def _whole(samples: object) -> int:
    """Return a number of samples; raise ConfigError if it is none."""
    try:
        number = operator.index(samples)  # type: ignore[arg-type]  # that is what is asked
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(
            f"samples is {samples}; it must be a whole number, at least 0. Pass what the loss is "
            "a mean over, the sum of class weights, say, as weight=."
        )
    return number


def _finite(weight: object) -> float:
    """Return a weight as a number; raise ConfigError if it can't be one."""
    try:
        number = float(weight)  # type: ignore[arg-type]  # a tensor of one element has one
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ConfigError(
            f"weight is {weight}; it must be a finite number, at least 0: what this rank's loss "
            "is a mean over, such as the number of its tokens."
        )
    return number


def _parts(batch: BatchSlice) -> list[Fraction]:
    """Return the ranks' parts of a global batch."""
    counts = (end - begin for begin, end in pairwise(batch.cuts))
    return [Fraction(count, batch.global_count) for count in counts]
