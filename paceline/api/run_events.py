"""What the event file is told of a script's run, besides what each step tells of itself."""

from __future__ import annotations

from paceline.cluster.membership.members import Members
from paceline.data.batch_slice import BatchSlice
from paceline.data.order import Order
from paceline.recorder import Recorder
from paceline.wiring import Start


class RunEvents:
    """Tells a recorder.

    Args:
        recorder: is told.
        members: the world.
        start: of the run.
        device: where it computes, "cpu" or "cuda".

    Attributes:
        model: what the model is called.
    """

    def __init__(self, recorder: Recorder, members: Members, start: Start, device: str) -> None:
        self._recorder, self._members, self._device = recorder, members, device
        self._generation, self._origin = start.generation, start.origin
        self.model = ""

    def begin(self, order: Order | None, number: int) -> None:
        """Tell of this start, before its first step, `number`.

        Args:
            order: of the loader that trains; without one nobody can prove what was trained.
            number: of the step.
        """
        self._recorder.event(
            "run",
            generation=self._generation,
            rank=self._members.rank,
            world_size=self._members.world_size,
            machines=len(self._members.machines),
            samples=order and order.samples,
            steps=order and order.steps,
            epochs=None,  # the script knows
            batch=order and order.batch_size,
            model=self.model,
            device=self._device,
        )
        self._recorder.event(
            "restore", generation=self._generation, step=number, origin=self._origin
        )

    def trained(self, place: BatchSlice) -> None:
        """Tell of a share that was trained in a later one's step."""
        self._recorder.event(
            "step",
            generation=self._generation,
            step=place.number,
            epoch=place.epoch,
            first=place.first,
            last=place.last,
            skipped=place.skipped,
        )
