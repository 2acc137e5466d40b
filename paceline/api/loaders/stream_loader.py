"""`StreamLoader`: steps over the ranks' own streams, which may end unevenly.

    rank 0   batch  batch  batch (5 of 8)   ·              weights 8/16 8/16 5/13 0/8
    rank 1   batch  batch  batch           batch           weights 8/16 8/16 8/13 8/8
             all ranks make the same steps

All ranks learn the numbers of samples of a step from an all-reduce that travels during the step
before. A rank whose stream has ended yields its last batch again, with weight 0: the loop's body
runs as on the other ranks, and clips, averages and schedules the same update.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import accumulate
from typing import Any

from paceline.api.script_loop import ALIKE
from paceline.api.world import World
from paceline.comm.communicator import CountsTicket
from paceline.data.batch_count import samples_in
from paceline.data.batch_slice import BatchSlice
from paceline.data.stream import Stream
from paceline.errors import ConfigError
from paceline.timeline.timeline import WAIT_FOR_INPUT

UNEVEN = ("join", "shortest")
_NEXT_BATCH = "the loader's next batch"
_WHAT = "the numbers of samples of the ranks' next batches"


class CurrentBatch:
    """Position of a loader's iteration.

    Args:
        train: the loader's batches are for `world.step()`.
        collates: batches are made by a function of the script, which may leave samples out.
    """

    def __init__(self, world: World, *, train: bool, collates: bool) -> None:
        self._world = world
        self._train = train
        self._collates = collates
        self._step = 0
        self._count = 0

    @property
    def epoch(self) -> int:
        """The active epoch, or the one that the next iteration begins; 0 for evaluation."""
        return self._world.epoch if self._train else 0

    @property
    def step(self) -> int:
        """The index of the current batch in its epoch, from 0."""
        return self._step

    @property
    def count(self) -> int:
        """The number of this rank's samples in the current batch.

        It is 0 where the batch has fewer samples than ranks, or where this rank's stream has ended:
        then the batch that is yielded has no weight.
        """
        return self._count

    def _note(self, step: int, count: int) -> None:
        """Note the batch that is yielded next."""
        self._step = step
        self._count = count


class StreamLoader(CurrentBatch):
    """Data loader over an `IterableDataset` of each rank's own; `paceline.loader` makes it.

    Each iteration is an epoch, of as many steps on all ranks. A resumed run reads the epoch's
    stream again from its beginning, up to the position of the checkpoint.
    """

    def __init__(self, stream: Stream, world: World, *, train: bool, uneven: str) -> None:
        super().__init__(world, train=train, collates=stream.collate is not None)
        self._stream = stream
        self._shortest = uneven == "shortest"

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches; in training, as many on all ranks.

        Raises:
            ConfigError: a rank's stream is empty, no step trained the last batches, or the world
                is closed.
            CommError: a peer is lost, silent, or has ended.
            DataError: a worker process that loads data died or hangs.
            SystemExit: this process, or another, received a signal to stop; the state is saved.
        """
        return self._training_batches() if self._train else self._evaluation_batches()

    @property
    def _rank(self) -> int:
        """This rank's place among those that read streams of their own."""
        return self._world._run.context.along("data").rank

    def _evaluation_batches(self) -> Iterator[Any]:
        with closing(self._stream.batches(0, self._rank)) as batches:
            for self._step, (self._count, batch) in enumerate(batches):
                yield batch

    def _training_batches(self) -> Iterator[Any]:
        first = self._world._loop.begin_epoch()
        complete = False
        try:
            yield from self._batches_from(first)
            complete = True
        finally:
            self._world._position.end_iteration(complete=complete)

    def _batches_from(self, first: int) -> Generator[Any, None, None]:
        """Yield a batch for each step of the epoch from step `first` on."""
        world = self._world
        taken = world._position.begin_stream_epoch(first)
        with closing(self._stream.batches(world.epoch, self._rank)) as stream:
            batches = world._run.timeline.each(WAIT_FOR_INPUT, stream)
            placeholder = None
            for _ in range(first):
                placeholder = next(batches, placeholder)
            step = first
            own = next(batches, None)
            counts = self._exchange(own)
            while self._go_on(step, of_all := next(counts)):
                batch_slice = self._slice(step, taken, of_all)
                if (known := own or placeholder) is None:
                    raise ConfigError(
                        f"rank {world.rank}'s stream has no batch in epoch {world.epoch}, which "
                        "the checkpoint has begun: pass the same data, or a different run= to "
                        "paceline.join()."
                    )
                count = 0 if own is None else own[0]
                batch = known[1]
                self._note(step, count)
                found = samples_in(batch, count) if self._collates and count else count
                world._loop.queue_slice(batch_slice, found)
                placeholder = known
                own = None if own is None else next(batches, None)
                counts = self._exchange(own)
                if len(world._position.waiting) > 1:  # or this rank alone has skipped a batch
                    with world._run.context.activities.call(_NEXT_BATCH, remedy=ALIKE):
                        counts = iter([next(counts)])
                yield batch
                step = step + 1
                taken = batch_slice.cuts[-1]
        world._loop.end_steps()

    def _exchange(self, own: tuple[int, Any] | None) -> Iterator[list[int]]:
        """Begin to gather the ranks' numbers of samples of a step; yield them when asked."""
        world = self._world
        count = 0 if own is None else own[0]
        ticket = CountsTicket(world._run.context.group("data", "steps"), count)

        def received() -> Iterator[list[int]]:
            with world._end.exit_on_stop():
                counts = ticket.wait(_WHAT)
            yield counts

        return received()

    def _go_on(self, step: int, counts: Sequence[int]) -> bool:
        """Return whether a step with these numbers of samples is made, the same on all ranks."""
        if step == 0 and not all(counts):
            raise ConfigError(
                f"rank {counts.index(0)}'s stream has no batch in epoch {self._world.epoch}: give "
                "each rank a part of the data, by world.rank and world.world_size."
            )
        return all(counts) if self._shortest else any(counts)

    def _slice(self, step: int, taken: int, counts: Sequence[int]) -> BatchSlice:
        position = self._world._position
        return BatchSlice(
            epoch=position.position.epoch,
            step=step,
            steps=step + 1,
            rank=self._rank,
            cuts=tuple(accumulate(counts, initial=taken)),
            run_number=position.position.number + len(position.waiting),
        )
