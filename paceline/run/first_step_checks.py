"""Checks of a script's first steps, for mistakes that change the result without an error.

    the model's inputs     ranks that are given the same batches: their loader isn't divided;
    and targets            where images are augmented at random, by the first inputs and all targets
    the loss's graph       a mean over values of which the ranks have unequal numbers a sample, such
                           as labels that aren't ignored; or a sum over a rank's samples

Each rank adds what it has seen to the step's summary. Nothing is exchanged besides, nor waited for.
Rank 0 reports each mistake once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from torch import nn

from paceline.data.batch_slice import BatchSlice
from paceline.errors import Message
from paceline.generation.run import Run
from paceline.generation.summaries import StepSummary
from paceline.replica.checksums import name_ranks
from paceline.replica.input_checksum import InputChecksum
from paceline.replica.loss_denominator import LossDenominator, LossTotal
from paceline.replica.target_checksum import TargetChecksum
from paceline.run.extension import Extension

STEPS = 12  # of a generation, that are checked
_ALIKE = 3  # steps in which inputs must be the same
_VALUES = 24  # that they must have together: a few labels may be equal by chance
_BITS = 30  # that targets must have together, likewise
_GPU_LAG = 2  # steps until what a GPU has computed is sure to be here
_SUM = -1.0  # what a rank adds where its loss is a sum
_TOLERANCE = 0.01  # of what losses are means over: a script may pass rounded numbers


class FirstStepChecks(Extension):
    """Checks of a script's first steps: equal inputs of ranks, and means over unequal numbers.

    Args:
        run: the run, of several ranks; rank 0 notes each mistake.
        models: the models, each once.
        gpu: whether a GPU computes.
        averaged: whether the ranks' weights are averaged, so that each has its own losses.

    Attributes:
        divided: whether the batches are those of a loader that divides them among the ranks.
    """

    def __init__(self, run: Run, models: Sequence[nn.Module], *, gpu: bool, averaged: bool) -> None:
        self.divided = False
        self._run = run
        self._lag = _GPU_LAG if gpu else 0
        self._watched = ExitStack()
        self._inputs = [InputChecksum(model) for model in models]
        self._targets = TargetChecksum()
        self._denominator = LossDenominator()
        self._open = True  # something is still to be found
        self._compares_denominators = not averaged
        self._watched.callback(self._targets.close)
        self._watched.callback(self._denominator.close)
        for inputs in self._inputs:
            self._watched.callback(inputs.close)
        self.begin_generation()

    def begin_generation(self) -> None:
        """Look at the steps of a generation, if nothing has been found yet."""
        self._rows = 0  # as many on all ranks, even if their steps differ by mistake
        self._batches: deque[tuple[int, BatchSlice | None]] = deque()  # by step
        self._seen: list[list[tuple[int, ...]]] = [[] for _ in self._inputs]  # checksums, by rank
        self._values = [0] * len(self._inputs)
        self._seen_targets: list[tuple[int, ...]] = []
        self._target_bits = 0.0

    def begin_step(self, number: int) -> None:
        """Look at a step, if it is one of the first."""
        if self._open and self._rows < STEPS:
            self._denominator.begin(number)
            if not self.divided:
                self._targets.begin(number)
                for inputs in self._inputs:
                    inputs.begin(number)

    def row(self, batch: BatchSlice) -> list[float]:
        """Return what this rank adds to a step's summary: 0 for other ranks, and where unknown."""
        size = self._run.context.along("data").size
        if size == 1 or self._rows == STEPS:
            self.close()
            return []
        self._rows += 1
        # A script that gives samples= and has several losses a step may have weighted them itself.
        trusted = batch.basis == "weight" or (batch.basis and self._denominator.backwards > 1)
        known = self._compares_denominators and not trusted and batch.weight > 0
        self._batches.append((batch.number, batch if known else None))
        self._denominator.end()
        row = [0.0] * size * (3 + len(self._inputs))
        if len(self._batches) <= self._lag:
            return row
        number, known_batch = self._batches.popleft()
        total = self._denominator.take(number)
        if total is not None and known_batch is not None:
            row[batch.rank] = _code(total, known_batch)
            row[size + batch.rank] = known_batch.weight
        target, bits = self._targets.take(number)
        row[-size + batch.rank] = float(target)
        self._target_bits += bits
        for index, inputs in enumerate(self._inputs):
            checksum, values = inputs.take(number)
            row[size * (2 + index) + batch.rank] = float(checksum)
            self._values[index] += min(values, _VALUES // _ALIKE)
        return row

    def receive(self, summary: StepSummary, row: Sequence[float]) -> None:
        """Take what all ranks have seen of a step."""
        if not self._open or not row:
            return
        size = self._run.context.along("data").size
        number = summary.step - self._lag
        self._compare_denominators(number, row[:size], row[size : 2 * size])
        for index in range(len(self._inputs)):
            checksums = row[size * (2 + index) : size * (3 + index)]
            if all(checksums):
                self._seen[index].append(tuple(map(int, checksums)))
                self._compare_inputs(index)
        targets = row[-size:]
        if targets and all(targets):
            self._seen_targets.append(tuple(map(int, targets)))
            self._compare_targets()

    def close(self) -> None:
        """Look no further."""
        self._open = False
        self._watched.close()

    def _compare_denominators(
        self, number: int, codes: Sequence[float], weights: Sequence[float]
    ) -> None:
        if not self._compares_denominators:
            return
        if all(code == _SUM for code in codes):
            self._compares_denominators = False
            self._note(
                Message(
                    f"in step {number} the loss was a sum, or a sum divided by the number of all "
                    "ranks' samples, but Paceline takes the mean of the ranks' losses: the "
                    "gradient depends on the number of workers. Divide the sum by the number of "
                    "this rank's samples, such as len(x)."
                )
            )
            return
        totals = {rank: code - 1 for rank, code in enumerate(codes) if code > 0}
        if not totals:
            return
        by_weight = {rank: total / weights[rank] for rank, total in totals.items()}
        most = max(by_weight, key=by_weight.__getitem__)
        least = min(by_weight, key=by_weight.__getitem__)
        bound = 1 + _TOLERANCE
        unequal = max(totals.values()) > bound * min(totals.values())
        if unequal and by_weight[most] > bound * by_weight[least]:
            self._compares_denominators = False
            self._note(
                Message(
                    f"in step {number} the loss was a mean over {totals[least]:g} values on rank "
                    f"{least} and {totals[most]:g} on rank {most}, more of them a sample on one "
                    "than on the other (labels that aren't ignored, tokens, pixels of a mask, sums "
                    "of class weights), but ranks count by their samples: the gradient depends on "
                    "the number of workers. Pass world.step(weight=n) on all ranks, n being what "
                    "this rank's loss is a mean over."
                )
            )

    def _compare_inputs(self, index: int) -> None:
        seen = self._seen[index]
        if len(seen) >= _ALIKE and self._values[index] >= _VALUES:
            self._report_alike(seen, f"their models got the same inputs in {len(seen)} steps")

    def _compare_targets(self) -> None:
        """Report ranks whose first inputs were the same, and whose targets are: all are augmented.

        Equal targets alone may be those of other samples: of data in a periodic order, say.
        """
        first = [seen[0] for seen in self._seen if seen]
        count = len(self._seen_targets)
        if first and count >= _ALIKE and self._target_bits >= _BITS:
            same = f"their models got the same first inputs, and the same targets in {count} steps"
            self._report_alike([*first, *self._seen_targets], same, len(first))

    def _report_alike(self, seen: Sequence[tuple[int, ...]], same: str, fixed: int = 0) -> None:
        """Report ranks whose checksums are equal, and differ from step to step.

        Args:
            seen: by step and rank.
            same: what is the same, a clause.
            fixed: the number of rows, at the beginning, that aren't of different steps.
        """
        ranks_of: dict[tuple[int, ...], list[int]] = {}
        for rank, checksums in enumerate(zip(*seen, strict=True)):
            ranks_of.setdefault(checksums, []).append(rank)
        for checksums, ranks in ranks_of.items():
            if self.divided or len(ranks) == 1 or len(set(checksums[fixed:])) == 1:
                continue
            self.divided = True  # or is known not to be
            named = "all ranks" if len(ranks) == len(seen[0]) else name_ranks(ranks)
            self._note(
                Message(
                    f"{named} train the same samples: {same}. Pass the data set to "
                    "paceline.loader(), which divides the batches and takes sampler= and weights=, "
                    "or give your own DataLoader a DistributedSampler(dataset, world.world_size, "
                    "world.rank). An IterableDataset must divide its samples itself, by world.rank "
                    "and world.world_size."
                )
            )

    def _note(self, note: Message) -> None:
        if self._run.leads:
            self._run.note(note)


def _code(loss: LossTotal, batch: BatchSlice) -> float:
    """Return a number above 0 for what a loss is a mean over, `_SUM` for a sum, 0 if in doubt."""
    samples = max(1, batch.last - batch.first)
    if loss.total is None:
        return _SUM if loss.values and loss.values % samples == 0 else 0.0
    of_all = loss.divides and samples < loss.total == batch.global_count != loss.values
    return _SUM if of_all else 1 + loss.total  # a rank may have no label
