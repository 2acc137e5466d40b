"""The trial of `--decode_device auto`: which device decodes faster, beside this run's own steps.

    step of the generation   0 …… 7  8 ……… 15  16 …… 19  20 …… 31   32
    decoded by               cuda    cuda      cpu       cpu        the faster one
                             starts  measured  starts    measured

All ranks switch at the same steps, and decide by the sums of all ranks' times. The decision is part
of the position: a resumed run keeps it. A new generation begins the trial anew.
"""

from __future__ import annotations

from statistics import median

import torch

from paceline.comm.communicator import total
from paceline.data.batch_slice import BatchSlice
from paceline.data.decoding.decode_pool import DecodeDevice
from paceline.errors import many
from paceline.generation.run import Run
from paceline.snapshots.position import Position

_MEASURED = {"cuda": range(8, 16), "cpu": range(20, 32)}  # steps of a generation
_SWITCH = 14  # batches are begun two steps ahead
_END = 32
_MARGIN = 1.02  # by which the GPU must be faster: the CPU gives the same bits on each machine


class DecodeTrial:
    """Trial of both devices in a generation's first steps.

    Args:
        position: of the run, which has the decision.
        present: where images are decoded now.
    """

    def __init__(self, run: Run, position: Position, present: DecodeDevice) -> None:
        self._run = run
        self._position = position
        self._present = present
        self._begun_in = ""
        self._first = 0
        self._last: float | None = None
        self._seconds: dict[str, list[float]] = {}

    def begin_step(self, place: BatchSlice) -> None:
        """Measure the step before, and switch or decide where it is time.

        Raises:
            CommError: a rank was lost in the decision.
        """
        if self._position.decode_device:
            self._present.name = self._position.decode_device
            return
        generation = self._run.context.world.generation.token
        if generation != self._begun_in:
            self._begun_in = generation
            self._first = place.number
            self._last = None
            self._seconds = {name: [] for name in _MEASURED}
            self._present.name = "cuda"
        step = place.number - self._first
        now = self._run.timeline.now()
        for name, steps in _MEASURED.items():
            if step in steps and self._last is not None:
                self._seconds[name].append(now - self._last)
        self._last = now
        if step == _SWITCH:
            self._present.name = "cpu"
        if step == _END:
            self._decide(place.global_count)

    def _decide(self, samples: int) -> None:
        """Keep the device with the shorter steps; collective."""
        own = [median(self._seconds[name]) for name in ("cuda", "cpu")]
        sums = torch.tensor(own, dtype=torch.float64)
        communicator = self._run.context.group("all", "steps")
        cuda, cpu = total(communicator, sums, "the times of decoding").tolist()
        chosen = "cuda" if cuda * _MARGIN < cpu else "cpu"
        self._position.decode_device = chosen
        self._present.name = chosen
        ranks = self._run.context.world.size
        rates = {"cuda": samples * ranks / cuda, "cpu": samples * ranks / cpu}
        text = (
            f"Images are decoded by {chosen}: training made {rates['cuda']:,.0f} images/s with "
            f"decoding by cuda and {rates['cpu']:,.0f} by cpu, on {many(ranks, 'worker')}."
        )
        self._run.recorder.event("note", text=text)
