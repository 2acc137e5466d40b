"""`average`: workers train locally; every H steps their weights are merged by an outer rule.

    step, step, …        local: torch's own optimizer, on this worker's part of the global batch
    end of a round       take: put own - anchor, weighted by samples
    the next steps       train on, while these are summed
    `delay` steps later  apply: own, anchor, state = rule.merge(own, anchor, mean, state)

The anchor is what all workers agreed on at the last merge; it is equal on all of them, bit for bit.
Where steps were made since the weights were taken, what they changed is added to the result, as in
CoCoD-SGD (Shen et al. 2019, arXiv 1906.12043). With `mix` the newer weights are blended with it, as
in Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, section 2.3):

    own = merged + (own - taken)                without `mix`
    own = mix * own + (1 - mix) * merged        with it

The model may be merged in fragments, each at another step of the round, so that the link carries an
even stream. Running statistics of BatchNorm layers are merged by their mean, with fragment 0; after
a delayed merge a worker trains on with its own, and the anchor has the mean. Where momenta are
averaged, they are in their parameters' fragments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.algorithms.merged_bucket import STATISTICS, MergedBucket, ranges_of
from paceline.algorithms.merged_momenta import MergedMomenta
from paceline.algorithms.synchronizer import StepInfo, Weights
from paceline.comm.peer_activities import Startup
from paceline.errors import CommError, ServerLost
from paceline.recorder import Recorder
from paceline.reduce.buckets import Bucket
from paceline.reduce.exchange import Exchange
from paceline.reduce.rank_state import MISSED, RankState
from paceline.timeline.timeline import Timeline
from paceline.update.outer.round_schedule import RoundSchedule


@dataclass
class _Fragment:
    """Fragment: buckets that are merged together.

    Attributes:
        buckets: their indices.
        samples: this worker's samples since the last take, and those of all workers.
        taken_after: the step after which the merge under way was taken; None: there is none.
        versions: of the exchange, by the index of a bucket whose sums are awaited.
        sums: (values,), by the index of a bucket: received, and not applied yet.
    """

    buckets: Sequence[int]
    samples: tuple[float, int] = (0.0, 0)
    taken_after: int | None = None
    versions: dict[int, int] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)


def weights_name(index: int) -> str:
    """Return the name under which a bucket's weights are exchanged."""
    return f"the weights of bucket {index}"


class Averaging:
    """Synchronizer by weight averaging: begins merges, exchanges them, and applies them when due.

    Gradients are local, so a step reads and sends nothing. The samples of a step count in the next
    merge, also where no optimizer has stepped.

    Args:
        buckets: what is merged, one for each bucket of the exchange.
        fragments: the indices of each fragment's buckets; each bucket is in one.
        exchange: sums the buckets over the workers.
        schedule: of the rounds.
        mix: the fraction of this worker's newer weights that a delayed merge retains; None: what
            the newer steps changed is added to the merged weights.
        forgets: the optimizer whose state each merge resets; None: it stays.
        recorder: receives the event `merge`.
        timeline: receives the spans `send`, `wait` and `update`, each with its bucket, and the
            numbers of bytes `sent` and `received`.
        startup: ended once, after the first merge.
        residuals: of a lossy wire, on this rank.

    Attributes:
        last_round: the first step of the last completed round, and the step after its end: in
            between, the last fragment was taken once. (0, 0) before there is one.
        ends: why the run ends once its state is saved, without another step; None: it continues.
        written: whether a script has written parameters between two steps, other than by a load:
            that counts as trained.
    """

    def __init__(
        self,
        buckets: Sequence[MergedBucket | MergedMomenta],
        fragments: Sequence[Sequence[int]],
        exchange: Exchange,
        schedule: RoundSchedule,
        *,
        mix: float | None,
        forgets: Optimizer | None,
        recorder: Recorder,
        timeline: Timeline,
        startup: Startup,
        residuals: RankState | None = None,
    ) -> None:
        self._buckets = tuple(buckets)
        self._exchange = exchange
        self._schedule = schedule
        self._of_model = {i: b for i, b in enumerate(buckets) if isinstance(b, MergedBucket)}
        self._fragments = [_Fragment(buckets=tuple(indices)) for indices in fragments]
        self._mix = mix
        self._forgets = forgets
        self._recorder = recorder
        self._timeline = timeline
        self.residuals = residuals
        self._startup: Startup | None = startup
        self._info = StepInfo(0, 0.0)
        self._step = 0  # the next one
        self._shows_anchor = False
        self._fresh = True  # no step was made, and nothing was restored
        self._left: list[tuple[int, int]] | None = None  # how parameters were after a step
        self.written = False  # a script has written them since, before the next one
        self.last_round = (0, 0)
        self.ends: ServerLost | None = None

    def begin(self, step: StepInfo) -> None:
        """Apply the merges that are due before a step; the model has this worker's own weights.

        Raises:
            ConfigError: the model was written while it had the merged weights.
            CommError: a peer was lost, or silent.
        """
        self._look()
        self._hide_anchor()
        if self._fresh:
            self._fresh = False
            self._rebase_unequal()
        self._info = step
        self._step = step.number
        due = self._schedule.applied_before(step.number)
        applied = [n for n in due if self._fragments[n].taken_after is not None]
        for number in applied:
            self._apply(number)
        if applied and self._forgets is not None:
            self._forgets.state.clear()

    def before_read(self, bucket: Bucket) -> None:
        """Wait for nothing: a worker's own weights are final after each update."""

    def gradient_ready(self, bucket: Bucket) -> None:
        """Send nothing."""

    def end(self, *, update: bool) -> None:
        """Count the samples of a step, and take what is due after it.

        Raises:
            CommError: a peer was lost, or silent.
        """
        step = self._info
        self._step = step.number + 1
        for fragment in self._fragments:
            own, of_all = fragment.samples
            fragment.samples = own + step.weight * step.samples, of_all + step.samples
        for number in self._schedule.taken_after(step.number):
            self._take(number)
        self._left = self._present()

    def settle(self, weights: Weights = Weights.OWN) -> None:
        """Let the model have this worker's own weights; or until the next step those of a merge.

        Raises:
            ConfigError: the model was written while it had the weights of a merge.
            CommError: a peer was lost, or silent, in a merge.
        """
        if weights is Weights.MERGED:
            self._merge()
        if weights is Weights.OWN:
            self._hide_anchor()
        else:
            self._show_anchor()

    def close(self, *, drain: bool = False) -> None:
        """Close the exchange."""
        if drain:
            with suppress(CommError):  # a peer that has gone needs nothing
                for fragment in self._fragments:
                    self._receive(fragment)
            self._exchange.drain()
        self._exchange.close()

    def _merge(self) -> None:
        """Merge at once what was trained since the last merges; collective."""
        self._look()
        self._hide_anchor()
        merges = self.unmerged
        for number, fragment in enumerate(self._fragments):
            if fragment.taken_after is not None:
                self._apply(number)
        trained = [n for n, fragment in enumerate(self._fragments) if fragment.samples[1]]
        for number in trained:
            self._take(number)
        for number in trained:
            self._apply(number)
        self._left = self._present()
        if merges and self._forgets is not None:
            self._forgets.state.clear()

    def rebase(self, written: Collection[Tensor]) -> None:
        """Let training begin anew with values that a script has loaded: they become the anchor.

        Merges under way are awaited, and change nothing of them. All ranks load the same values
        between the same two steps.

        Args:
            written: parameters and running statistics.

        Raises:
            CommError: a peer was lost, or silent.
        """
        for fragment in self._fragments:
            self._receive(fragment)
        for index, bucket in self._of_model.items():
            ranges = ranges_of(bucket.values, written)
            if ranges:
                bucket.rebase(ranges)
                self._forget(index, ranges)
        self._left = self._left and self._present()

    def _present(self) -> list[tuple[int, int]]:
        """Return what changes where a parameter is written, or gets other memory."""
        values = (bucket.values for bucket in self._of_model.values())
        return [
            (tensor._version, tensor.data_ptr())
            for each in values
            if each.names != (STATISTICS,)  # which a forward between two steps may change
            for tensor in each.tensors
        ]

    def _look(self) -> None:
        """Note whether parameters were written since the last step, other than by a load."""
        if not self._shows_anchor and self._left is not None:
            self.written |= self._left != self._present()

    def _rebase_unequal(self) -> None:
        """Make what a script has written before the first step the anchor."""
        for bucket in self._of_model.values():
            own = torch.empty_like(bucket.anchor)
            bucket.values.read(own)
            parameters = bucket.values.names != (STATISTICS,)  # statistics differ between ranks
            if parameters and not torch.equal(own, bucket.anchor):
                bucket.rebase([(0, len(own))])

    def _forget(self, index: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Drop the sums under way of some values of a bucket, and what rounding missed of them."""
        for fragment in self._fragments:
            if index in fragment.sums:
                for start, stop in ranges:
                    fragment.sums[index][start:stop] = 0
        if self.residuals is None:
            return
        state = self.residuals.local(in_step=False)
        entry = state.get(MISSED, {}).get(weights_name(index))
        if entry is not None:
            first, last, values = entry
            for start, stop in ranges:
                values[max(start, first) - first : max(min(stop, last), first) - first] = 0
            self.residuals.restore_local(state)

    def _show_anchor(self) -> None:
        """Let the model have the weights of the last merge, until the next step; local."""
        if not self._shows_anchor:
            self._look()
            self._shows_anchor = True
            for bucket in self._of_model.values():
                bucket.show()
            for bucket in self._of_model.values():
                bucket.watch()

    def _hide_anchor(self) -> None:
        """Let the model have this worker's own weights again."""
        if self._shows_anchor:
            self._shows_anchor = False
            for bucket in self._of_model.values():
                bucket.check()
            for bucket in self._of_model.values():
                bucket.hide()
            self._left = self._left and self._present()

    @property
    def unmerged(self) -> bool:
        """Whether steps were made that the anchor doesn't have yet."""
        return any(f.samples[1] or f.taken_after is not None for f in self._fragments)

    def _take(self, number: int) -> None:
        fragment = self._fragments[number]
        if fragment.taken_after is not None:
            self._apply(number)
        samples, of_all = fragment.samples
        fragment.samples = (0.0, 0)
        fragment.taken_after = self._step - 1
        if fragment is self._fragments[-1]:
            self.last_round = self.last_round[1], self._step
        self._exchange.begin(1.0, fragment.buckets)
        for index in fragment.buckets:
            bucket = self._buckets[index]
            bucket.take()
            operation = f"the merge of bucket {index} after step {self._step - 1}"
            with self._timeline.span("send", bucket=index):
                weight = samples / of_all if of_all else 0.0
                version = self._exchange.send(index, [bucket.change], weight, operation)
            fragment.versions[index] = version
            sent, received = self._exchange.traffic[index]
            self._timeline.count("sent", sent)
            self._timeline.count("received", received)

    def _apply(self, number: int) -> None:
        fragment = self._fragments[number]
        assert fragment.taken_after is not None
        steps = self._step - 1 - fragment.taken_after
        for index in chain(list(fragment.sums), self._received(fragment)):  # others still travel
            with self._timeline.span("update", bucket=index):
                sums = fragment.sums.pop(index)
                self._buckets[index].apply(sums, steps=steps, mix=self._mix)
        self._recorder.event(
            "merge", step=self._step, fragment=number, taken_after=fragment.taken_after
        )
        fragment.taken_after = None
        if self._startup is not None:
            self._startup.end_startup()
            self._startup = None

    def _receive(self, fragment: _Fragment) -> None:
        """Wait for the sums of a fragment."""
        for _ in self._received(fragment):
            pass

    def _received(self, fragment: _Fragment) -> Iterator[int]:
        """Wait for the sums of a fragment, and yield each bucket whose are there."""
        while fragment.versions:
            last = next(reversed(fragment.versions))  # the most urgent, which arrives first
            index = self._exchange.first_to_wait_for(last)
            with self._timeline.span("wait", bucket=index):
                (sums,) = self._exchange.wait(index, fragment.versions.pop(index))
            fragment.sums[index] = self._buckets[index].without_samples() if sums is None else sums
            yield index

    def local(self) -> dict[str, Any]:
        """Return this worker's state between two steps, besides what the optimizer has.

        Merges under way are awaited, and applied later all the same. Tensors are views of the state
        itself.

        Returns:
            "own", and of merges under way "taken": values by name, flat; "samples": (fragments,)
            this worker's since the last take; "residual": as of `RankState.local`, or None.

        Raises:
            CommError: a peer was lost, or silent.
        """
        self._hide_anchor()
        for fragment in self._fragments:
            self._receive(fragment)
        residual = None if self.residuals is None else self.residuals.local(in_step=False)
        own = {index: torch.empty_like(b.anchor) for index, b in self._of_model.items()}
        for index, bucket in self._of_model.items():
            bucket.values.read(own[index])
        under_way = [i for f in self._fragments if f.taken_after is not None for i in f.buckets]
        return {
            "own": self._by_name(own),
            "taken": self._by_name({i: self._buckets[i].taken for i in under_way}),
            "samples": [fragment.samples[0] for fragment in self._fragments],
            "residual": residual,
        }

    def shared(self) -> dict[str, Any]:
        """Return what all workers have alike, after `local`.

        Returns:
            "anchor", "outer" (by the name of the rule's tensor) and "sums": values by name, flat;
            "step", the next one; for each fragment, "samples" of all workers since the last take,
            "taken_after" and the names that it has, "fragments".
        """
        states = {name for bucket in self._buckets for name in bucket.outer}
        outer = {
            name: {i: b.outer[name] for i, b in enumerate(self._buckets) if name in b.outer}
            for name in states
        }
        sums = {index: one for f in self._fragments for index, one in f.sums.items()}
        return {
            "anchor": self._by_name({i: b.anchor for i, b in self._of_model.items()}),
            "outer": {name: self._by_name(flats) for name, flats in outer.items()},
            "sums": self._by_name(sums),
            "samples": [fragment.samples[1] for fragment in self._fragments],
            "step": self._step,
            "taken_after": [fragment.taken_after for fragment in self._fragments],
            "fragments": self._names_of_fragments(),
        }

    def restore(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> bool:
        """Restore what `local` and `shared` returned, between two steps.

        Values that they lack, or have in another size, stay as they are.

        Args:
            shared: what all workers had alike.
            own: what this worker had; None: it begins with the anchor, as a new worker does.

        Returns:
            False where fragments, workers or wires are others, so that what was under way in the
            round, or what rounding missed, is dropped.
        """
        for index, bucket in self._of_model.items():
            self._copy_named(shared["anchor"], index, bucket.anchor)
            for name, flat in bucket.outer.items():
                if name in shared["outer"]:
                    self._copy_named(shared["outer"][name], index, flat)
            bucket.values.write(bucket.anchor)
        self._fresh = False
        self._left = None
        self._step = shared.get("step", 0)
        self.last_round = self._step, self._step
        if own is None:
            return False
        for index, bucket in self._of_model.items():
            weights = bucket.anchor.clone()  # of a parameter that was frozen then, say
            self._copy_named(own["own"], index, weights)
            bucket.values.write(weights)
        if shared["fragments"] != self._names_of_fragments():
            return False
        for number, fragment in enumerate(self._fragments):
            fragment.samples = own["samples"][number], shared["samples"][number]
            fragment.taken_after = shared["taken_after"][number]
            if fragment.taken_after is None:
                continue
            for index in fragment.buckets:
                each = self._buckets[index]
                taken = self._buckets[index].taken
                if index not in self._of_model and each.values.names[0] not in own["taken"]:
                    each.take()  # momenta that were not averaged then stay as they are
                    fragment.sums[index] = taken.clone()
                    continue
                self._copy_named(own["taken"], index, taken)
                fragment.sums[index] = torch.zeros_like(taken)
                self._copy_named(shared["sums"], index, fragment.sums[index])
        if self.residuals is None or own["residual"] is None:
            return own["residual"] is None
        return self.residuals.restore_local(own["residual"])

    def anchors(self) -> dict[str, Tensor]:
        """Return the parameters of the last merge by name, flat; views."""
        flats = {index: bucket.anchor for index, bucket in self._of_model.items()}
        named = self._by_name(flats)
        named.pop(STATISTICS, None)
        return named

    def _names_of_fragments(self) -> list[list[str]]:
        return [
            sorted(n for i in fragment.buckets if i in self._of_model for n in self._names(i))
            for fragment in self._fragments
        ]

    def _names(self, index: int) -> tuple[str, ...]:
        return self._buckets[index].values.names

    def _by_name(self, flats: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in flat ones of buckets, by name; views, flat."""
        found: dict[str, Tensor] = {}
        for index, flat in flats.items():
            values = self._buckets[index].values
            found.update(zip(values.names, flat.split(values.lengths), strict=True))
        return found

    def _copy_named(self, named: Mapping[str, Tensor], index: int, flat: Tensor) -> None:
        """Copy what a mapping has of a bucket's values to `flat`; other values stay."""
        values = self._buckets[index].values
        ends = list(accumulate(values.lengths))
        for name, start, stop in zip(values.names, [0, *ends], ends, strict=False):
            if name in named and named[name].numel() == stop - start:
                flat[start:stop] = named[name].flatten()
