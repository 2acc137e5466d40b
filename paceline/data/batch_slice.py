"""Batch slice: the position of a rank's share of a global batch in the data order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """Batch slice: positions `first` to `last` - 1 of an epoch's order, and the other ranks'.

    Attributes:
        epoch: the epoch's number, from 0.
        step: the step's number within the epoch, from 0.
        steps: the number of steps per epoch.
        cuts: the shares of all ranks, as positions in the epoch's order: rank r has the positions
            cuts[r] to cuts[r + 1] - 1.
        skipped: the number of samples of the slice that couldn't be read and are left out.
        fraction: the weight of its mean loss in the global one; None: its fraction of the samples.
        basis: what a script has given as the base of the weight: "samples", "weight", or "".
        min_slice: the number of samples of a placeholder, where the batch has as many.
        run_number: the number of the step in the run, where epochs have no fixed number of steps.
    """

    epoch: int
    step: int
    steps: int
    rank: int
    cuts: tuple[int, ...]
    skipped: int = 0
    fraction: float | None = None
    min_slice: int = 1
    basis: str = ""
    run_number: int | None = None

    @property
    def number(self) -> int:
        """The number of the step in the run, from 0."""
        if self.run_number is not None:
            return self.run_number
        return self.epoch * self.steps + self.step

    @property
    def first(self) -> int:
        """The slice's first position in the epoch's order."""
        return self.cuts[self.rank]

    @property
    def last(self) -> int:
        """The position after the slice's last one."""
        return self.cuts[self.rank + 1]

    @property
    def global_count(self) -> int:
        """The number of samples of the global batch, over all ranks."""
        return self.cuts[-1] - self.cuts[0]

    @property
    def count(self) -> int:
        """The number of samples that this rank trains; 0: it computes a placeholder."""
        return self.last - self.first - self.skipped

    @property
    def computed(self) -> slice:
        """The positions that this rank computes: its share, or a placeholder if that is empty."""
        if self.first < self.last:
            return slice(self.first, self.last)
        count = min(self.min_slice, self.global_count)
        # Any samples of the batch do, because they count
        # with weight 0; those of this batch have its shape.
        placeholder = min(self.first, self.cuts[-1] - count)  # in the batch, of whichever rank
        return slice(placeholder, placeholder + count)

    @property
    def weight(self) -> float:
        """The share's part of the global batch, by which its mean loss counts.

        A skipped sample adds nothing, for any number of ranks: the others count as before.
        """
        return self.count / self.global_count if self.fraction is None else self.fraction
