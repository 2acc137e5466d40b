"""Batches of this rank's slices of the global batches, the next few made ahead.

    step t   ──▶  slices of t, t + 1, t + 2  ──▶  loader: batch of t; t + 1 and t + 2 are begun

Slices are those of the present generation and of the present shares: a slice that was begun ahead
may be another one when its step comes.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.data.batch_slice import BatchSlice
from paceline.data.decoding.decode_pool import DecodeDevice, DecodePool
from paceline.data.loader import Batch, DatabaseLoader
from paceline.generation.run import Run
from paceline.run.decode_trial import DecodeTrial
from paceline.run.small_slices import SmallSlices
from paceline.run.worker_speeds import WorkerSpeeds
from paceline.timeline.timeline import WAIT_FOR_INPUT

_AHEAD = 2  # batches
_SHORTEST_S = 5.0  # of an epoch; a shorter one waits for its first batches, and says little
_NAMED = 0.05  # share of the time that steps waited for batches, above which a note names it


@dataclass(kw_only=True, eq=False)
class Batches:
    """Batches of a loader by their step.

    Attributes:
        run: the run, which knows the rank and the world size.
        speeds: has the ranks' shares of the global batch.
        epochs: number of epochs of the run, after which nothing is made ahead.
        trains: whether steps are those of the training; the batches of an evaluation are divided by
            the present shares.
        decoding: the decode processes.
        decode_device: the present one of training.
        trial: the trial of decoding on CPU and GPU; None: the device is given.
        small: knows the smallest slice; an evaluation has no such rule.
    """

    loader: DatabaseLoader
    run: Run
    speeds: WorkerSpeeds
    epochs: int
    trains: bool
    decoding: DecodePool
    decode_device: DecodeDevice
    small: SmallSlices
    trial: DecodeTrial | None = None
    _waited: float = 0.0  # seconds, before the present epoch

    @property
    def steps(self) -> int:
        """Number of steps per epoch."""
        return self.loader.order.steps

    @property
    def samples(self) -> int:
        """Number of samples per epoch, over all ranks."""
        return self.loader.order.samples

    def batch(self, epoch: int, step: int) -> Batch:
        """Take this rank's share of a global batch, and begin the ones after it.

        Raises:
            IndexError: the epoch has no such step.
            DataError: see `DatabaseLoader.batch`.
            CommError: a rank was lost in the choice of the device that decodes.
        """
        following = (divmod(step + more, self.steps) for more in range(1, _AHEAD + 1))
        later = [(epoch + more, at) for more, at in following]
        ahead = [self._slice(*each) for each in later if each[0] < self.epochs]
        place = self._slice(epoch, step)
        if self.trial is not None and self.trains:
            self.trial.begin_step(place)
        if not self.trains:
            return self.loader.batch(place, ahead)
        with self.run.timeline.span(WAIT_FOR_INPUT):
            return self.loader.batch(place, ahead)

    def end_epoch(self, seconds: float) -> float:
        """Return the share of an epoch's time for which this rank's steps waited for batches.

        Where it is above 5% of an epoch of five seconds or more, a note names what shortens the
        waits.

        Args:
            seconds: the time that the epoch's steps have taken.
        """
        waited = self.run.timeline.seconds(WAIT_FOR_INPUT)
        share = (waited - self._waited) / seconds
        self._waited = waited
        remedy = self.decoding.remedy()
        if share > _NAMED and seconds >= _SHORTEST_S:
            rank, _ = self.run.rank_and_size()
            text = f"Rank {rank} waited for images {share:.0%} of the epoch's time: {remedy}"
            self.run.recorder.event("note", text=text)
        return share

    def close(self) -> None:
        """Drop what was begun."""
        self.loader.close()

    def _slice(self, epoch: int, step: int) -> BatchSlice:
        rank, world_size = self.run.rank_and_size()
        number = epoch * self.steps + step
        shares = self.speeds.shares(number) if self.trains else self.speeds.present_shares()
        min_slice = self.small.min_slice if self.trains else 1
        return self.loader.order.place(epoch, step, rank, world_size, shares, min_slice)
