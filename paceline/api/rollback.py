"""What a lost peer means to a script's loop: it continues from the snapshot that the run restores.

    for x, y in loader:
        with world.step() as step:      a peer is lost: the block ends, or what remains of it runs
            …                           on a plain model, which is not updated
        schedule.step()                 undone with the rest
                                        the next batch is the snapshot's: the run went back

Between the loss and the next batch the model has no hooks, and its state may be anything: nothing
is sent, and what the script changes is restored with the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.api.sample_position import SamplePosition
from paceline.api.world_end import WorldEnd
from paceline.errors import CommError
from paceline.replica.group import AnyReplica
from paceline.run.steps import Steps


class Rollback:
    """Return of a script's loop to a snapshot, after a peer is lost.

    Args:
        position: the run's position.
        end: the world's end, where the run can't continue.

    Attributes:
        steps: the steps of the model; None: there is no model yet.
        error: reports the lost peer, until the loader goes back to a snapshot; None: none is lost.
    """

    def __init__(self, position: SamplePosition, end: WorldEnd) -> None:
        self._position, self._end = position, end
        self.steps: Steps | None = None
        self.error: CommError | None = None

    def lose(self, error: CommError) -> None:
        """Leave a generation that has lost a peer; raise its error where the run can't continue."""
        if self.error is not None:  # this is what follows from it
            return
        if self.steps is None or self._position.order is None:
            raise error
        self.steps.recovery.leave_generation(error)
        self.error = error

    def go_back(self) -> int:
        """Go back to a snapshot, and enter the next generation; return the epoch's next step."""
        assert self.steps is not None
        assert self.error is not None
        with self._end.exit_on_stop():
            self.steps.recovery.go_back(self.error)
        self.error = None
        self._position.discard_waiting()
        return self._position.position.step

    @contextmanager
    def accumulating(self, replica: AnyReplica) -> Iterator[None]:
        """Accumulate gradients inside; where a peer is lost, the block ends early."""
        try:
            with replica.no_sync():
                yield
        except CommError as error:
            self.lose(error)
