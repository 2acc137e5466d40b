"""What a lost peer means to a script's loop: it continues from the snapshot that the run restores.

    for x, y in loader:
        with world.step() as step:      a peer is lost: the block ends, or what remains of it runs
            …                           on a plain model, which is not updated
        schedule.step()                 undone with the rest
                                        the next batch is the snapshot's: the run went back
    for x, y in world.evaluation(test): a peer is lost: nothing is undone, because the newest
    next epoch                          snapshot is that of the epoch's last step

Between the loss and the next batch the model has no hooks, and its state may be anything: nothing
is sent, and what the script changes is restored with the snapshot.

A rank may learn of a loss at a later place of the script than another: the latter's collective
operation failed, that of the former was complete. So all ranks of the next generation compare their
places, and a rank that is behind continues to the next place, without a further operation.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from paceline.api.argument_names import print_message_for_scripts
from paceline.api.sample_position import SamplePosition
from paceline.api.world_end import WorldEnd
from paceline.comm.communicator import gather_bytes, gather_texts
from paceline.errors import CommError
from paceline.replica.group import AnyReplica
from paceline.run.steps import Steps
from paceline.session.session import Session

_COMPARISON = "the comparison of the ranks' places in the script, after a loss"


class Place(IntEnum):
    """Place in a script between two steps, in the order in which a script comes by them.

    The begin and the end of an evaluation are `EVALUATION` and the next number; those of another
    one between the same steps are the two numbers after these, and so on.
    """

    EPOCH_END = 0
    EVALUATION = 1
    NEXT_EPOCH = 10**9
    STEP = NEXT_EPOCH + 1


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call that all ranks make: what a rank that is behind gets from another one.

    Attributes:
        value: what it returned, of one dtype and shape on all ranks.
    """

    place: int
    value: Tensor


class Rollback:
    """Return of a script's loop to a snapshot, after a peer is lost.

    Args:
        session: makes the steps.
        position: the run's position.
        end: the world's end, where the run can't continue.

    Attributes:
        error: reports the lost peer, until the loader goes back to a snapshot; None: none is lost.
        moved: whether the ranks have changed since the loader's last batch, without a return.
        entered: whether this rank has entered a later generation.
        outcome: of this rank's last call that all ranks make.
    """

    def __init__(self, session: Session, position: SamplePosition, end: WorldEnd) -> None:
        self._session = session
        self._position = position
        self._end = end
        self._run = session.run
        self._behind = False  # other ranks are at a later place
        self._evaluated: tuple[int, int] | None = None  # after that number of steps; its place
        self.error: CommError | None = None
        self.moved = False
        self.entered = False
        self._in_step = False  # the loss was noticed in a step, which is to be made again
        self.outcome: Outcome | None = None

    @property
    def _steps(self) -> Steps | None:
        """The steps of the model; None: there is no model yet."""
        return self._session.steps

    @property
    def possible(self) -> bool:
        """Whether the loop continues where a peer is lost; the same on all ranks."""
        steps = self._steps
        if steps is None or self._position.order is None:
            return False
        return steps.recovery.survives

    @property
    def goes_back(self) -> bool:
        """Whether the loop certainly goes back to an earlier step, once a peer is lost."""
        return self._steps is None or self._in_step or not self._steps.holds_present

    def lose(self, error: CommError, *, in_step: bool = False) -> None:
        """Leave a generation that has lost a peer; raise its error where the run can't continue.

        Args:
            error: reports the lost peer.
            in_step: a step was active.
        """
        if self.error is not None:  # this is what follows from it
            return
        if self._steps is None or self._position.order is None:
            raise error
        self._steps.lose(error)
        self._in_step = in_step
        self.error = error

    def continue_steps(self) -> int:
        """Go back to a snapshot, if a peer is lost, and let steps continue; return the next one."""
        if self.error is not None:
            self.go_back()
        self.moved = False
        self.reach(Place.STEP)
        return self._position.position.step

    def go_back(self) -> None:
        """Go back to a snapshot, and enter the next generation."""
        assert self._steps is not None
        assert self.error is not None
        with self._end.exit_on_stop():
            self._steps.recovery.go_back(self.error)
        if self._run.leads:
            number = self._position.position.number
            print_message_for_scripts(
                f"the loader yields the batches from step {number:,} on again, so the script's "
                "own counters and sums count them twice. Use world.steps, world.meter() or "
                "world.track(), which went back with the model."
            )
        if self._evaluated is not None and self._evaluated[0] > self._position.position.number:
            self._evaluated = None  # it is repeated, or begins for the first time on other ranks
        self._note_entered()

    def enter_here(self, error: CommError) -> bool:
        """Enter the next generation in the present state: no step was made since its snapshot.

        Returns:
            whether it is entered. Otherwise its ranks have no snapshot of the present state, and
            the loader's next batch goes back to an earlier one.
        """
        self.lose(error)
        if self.goes_back:
            return False
        assert self._steps is not None
        with self._end.exit_on_stop():
            if not self._steps.recovery.go_back(error, unchanged=True):
                return False
        self._note_entered()
        self.moved = True
        return True

    def require_here(self, error: CommError) -> None:
        """Enter the next generation in the present state, as `enter_here`.

        Raises:
            CommError: the ranks have no snapshot of the present state.
        """
        if not self.enter_here(error):
            raise error

    def next_evaluation(self) -> int:
        """Return the place of the begin of an evaluation that begins now."""
        done = self._position.position.number
        place = int(Place.EVALUATION)
        if self._evaluated is not None and self._evaluated[0] == done:
            place = self._evaluated[1] + 2
        self._evaluated = done, place
        return place

    def reach(self, place: int) -> bool:
        """Return whether the ranks' operation at a place is to be made, or made again.

        It isn't where another rank has completed it; this one then continues to the next place.
        """
        while self._behind:
            try:
                places = self._gather_places(place)
                if min(places) < max(places):
                    self._share_outcome(places)
            except CommError as error:
                if place == Place.STEP:
                    self.lose(error)
                    self.go_back()
                else:
                    self.require_here(error)
                continue
            if place < max(places):
                return False
            self._behind = min(places) < place
        return True

    def _note_entered(self) -> None:
        self.error = None
        self._behind = True
        self._in_step = False
        self.entered = True
        self._position.discard_waiting()

    def _gather_places(self, place: int) -> list[int]:
        communicator = self._run.context.group("all", "steps")
        return list(map(int, gather_texts(communicator, str(int(place)), _COMPARISON)))

    def _share_outcome(self, places: Sequence[int]) -> None:
        """Give the ranks that are behind the outcome of their call, from a rank that has it.

        A rank that has completed a call is in the next one, which waits for all: it has the outcome
        of no later call.
        """
        own = self.outcome
        data = b""
        if own is not None and own.place in places:
            state = io.BytesIO()
            torch.save((own.place, own.value.cpu()), state)
            data = state.getvalue()
        for each in gather_bytes(self._run.context.group("all", "steps"), data, _COMPARISON):
            if each and not data:
                place, value = torch.load(io.BytesIO(each), weights_only=True)
                self.outcome = Outcome(place, value)
                return

    @contextmanager
    def accumulating(self, replica: AnyReplica) -> Iterator[None]:
        """Accumulate gradients inside; where a peer is lost, the block ends early."""
        try:
            with replica.no_sync():
                yield
        except CommError as error:
            self.lose(error)
