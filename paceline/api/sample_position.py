"""Sample position: which samples the next step of a script's loop trains.

    loader      slice ──▶ slice ──▶ slice ──▶ …         each yielded once, in the epoch's order
    steps         └─── step ─┘        └─ step …         a step trains all waiting slices

A step usually trains one batch slice. A loop that accumulates gradients over several batches trains
several. Of several models each may have steps of its own on a batch, one after another; together
they are one step of the run. Without a loader all steps are in one endless epoch, in which a rank
takes as many positions as its `samples`, or one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

from paceline.api.cell_errors import CellErrors
from paceline.comm.communicator import gather_counts
from paceline.data.batch_slice import BatchSlice
from paceline.data.order import Order
from paceline.errors import ConfigError, many
from paceline.run.position import Position
from paceline.run.run import Run


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
        measured: whether the ranks' shares of the loader's batches follow their speeds.
    """

    def __init__(
        self,
        position: Position,
        run: Run,
        errors: CellErrors | None = None,
    ) -> None:
        self.position = position
        self._errors = CellErrors(interactive=False) if errors is None else errors
        self.iterating = self.left_early = False
        self.begun = self.several = self.measured = False
        self._trained: BatchSlice | None = None  # by the last step, if another may train it too
        self._saved = False  # since the last step
        self._run = run
        self.order: Order | None = None
        self.waiting: list[BatchSlice] = []
        self.stream: Mapping[str, Any] | None = None
        self._saved_order: Mapping[str, Any] | None = None  # in the checkpoint
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

    def note_saved(self) -> None:
        """Note that the present state is saved: a resumed run begins with the next batch."""
        self._saved = True

    def discard_waiting(self) -> None:
        """Forget the slices that no step has trained, and the last one that a step has."""
        self.waiting.clear()
        self._trained = None

    def begin_iteration(self) -> None:
        """Begin an iteration of the loader, whose batches steps train."""
        self._trained = None
        self.begun = self.iterating = True
        self.left_early = False
        self._errors.begin()

    def end_iteration(self, *, complete: bool) -> None:
        """End it, after the last batch or before."""
        self._trained = None
        self.iterating, self.left_early = False, not complete

    def use_order(self, order: Order) -> None:
        """Use a loader's order from the first step on.

        Raises:
            ConfigError: there is such a loader already, steps were made without one, or the
                checkpoint has another order.
        """
        self._require_first_loader(stream=False)
        for name, saved in (self._saved_order or {}).items():
            own, subject = getattr(order, name), {"size": "the data set's length"}.get(name, name)
            if name == "epoch_size":
                own, saved, subject = own is not None, saved is not None, "drop_last"
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

    def next_slice(self, samples: int | None) -> tuple[BatchSlice, Sequence[BatchSlice]]:
        """Return the slice that the next step trains, and earlier ones that it trains too.

        Args:
            samples: the number of samples of which this rank's loss is the mean, or None;
                collective if it is given.

        Raises:
            ConfigError: no slice is waiting, or the numbers can't be used.
            CommError: a peer is lost or silent.
        """
        self.begun = True
        if self.measured:
            self._require_dividable(samples)
        if self.order is None and self.stream is None:
            return self._slice_without_loader(samples), ()
        if self.repeats:
            return self._repeated(samples), ()
        if not self.waiting:
            raise ConfigError(
                "world.step() was called without a batch: call it once for each batch of the "
                "loader, inside its loop; to accumulate the gradients of several backward passes "
                "in one step, use no_sync()."
            )
        *earlier, last = self.waiting
        if samples is not None:
            return replace(last, fraction=samples / sum(self._exchange_counts(samples))), earlier
        return (self._accumulated(last) if earlier else last), earlier

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
        self._trained, self._saved = trained, False

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        order = None if self.order is None else asdict(self.order)
        stream = {} if self.stream is None else {"stream": dict(self.stream)}
        sums = {"sums": list(self._sums)} if self._sums else {}
        return {"taken": self._taken, "order": order, **stream, **sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._taken, self._saved_order = state["taken"], state["order"]
        self._saved_stream = state.get("stream")
        self._saved_sums = state.get("sums", ())

    def _repeated(self, samples: int | None) -> BatchSlice:
        """Return the last step's slice, which another model's step trains too."""
        assert self._trained is not None
        if self._saved:
            raise ConfigError(
                "world.checkpoint() was called between two steps of one batch, so a resumed run "
                "would leave out the second one: call it before the first step of a batch, or "
                "after its last."
            )
        if samples is not None:
            counts = self._exchange_counts(samples)
            return replace(self._trained, fraction=samples / sum(counts))
        return self._trained

    def _accumulated(self, last: BatchSlice) -> BatchSlice:
        """Return one slice for all waiting ones; weight: local samples / global samples of all."""
        if any(begin == end for each in self.waiting for begin, end in pairwise(each.cuts)):
            raise ConfigError(
                f"in the step that ends at position {last.last}, one of the accumulated batches "
                "has fewer samples than the ranks need: give that batch a world.step() of its own."
            )
        if self.stream is not None and any(each.weight != last.weight for each in self.waiting):
            raise ConfigError(
                f"the batches accumulated in the step that ends at position {last.last} divide "
                "their samples differently among the ranks, as at the end of a stream: give each "
                'a world.step() of its own, or pass uneven="shortest" and drop_last=True.'
            )
        if self.measured and any(_parts(each) != _parts(last) for each in self.waiting):
            raise ConfigError(
                f"the batches accumulated in the step that ends at position {last.last} divide "
                "their samples differently among the ranks, as a short last batch does with "
                "shares='measured': give it a world.step() of its own, or pass drop_last=True to "
                "paceline.loader()."
            )
        local = sum(each.count for each in self.waiting)
        return replace(last, fraction=local / sum(each.global_count for each in self.waiting))

    def _slice_without_loader(self, samples: int | None) -> BatchSlice:
        """Return this rank's positions of the endless epoch; ranks take them in rank order."""
        if self._saved_order is not None or self._saved_stream is not None:
            raise ConfigError(
                "the run's checkpoint was written with a training loader, but this script has "
                "none: create the loader before the first step, or pass a different run= to "
                "paceline.join()."
            )
        rank, world_size = self._run.rank_and_size()
        counts = [1] * world_size if samples is None else self._exchange_counts(samples)
        number, cuts = self.position.number, tuple(accumulate(counts, initial=self._taken))
        self._next_taken = cuts[-1]
        return BatchSlice(epoch=0, step=number, steps=number + 1, rank=rank, cuts=cuts)

    def _exchange_counts(self, samples: int) -> list[int]:
        """Return the numbers of samples of all ranks; collective."""
        if samples < 0:
            raise ConfigError(f"samples is {samples}; it must be at least 0.")
        what = "the ranks' numbers of samples"
        received = gather_counts(self._run.context.communicator, samples, what)
        if not sum(received):
            raise ConfigError("samples is 0 on all ranks: a step needs at least one sample.")
        return received


def _parts(batch: BatchSlice) -> list[Fraction]:
    """Return the ranks' parts of a global batch."""
    counts = (end - begin for begin, end in pairwise(batch.cuts))
    return [Fraction(count, batch.global_count) for count in counts]
