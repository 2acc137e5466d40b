"""`--decode_device auto`: both devices are measured at fixed steps, and all ranks keep the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.data.decoding.decode_pool import DecodeDevice
from paceline.data.order import Order
from paceline.run.decode_trial import DecodeTrial
from paceline.snapshots.position import Position
from tests.harness.processes.worlds import run_of
from tests.harness.timelines import GivenTime

ORDER = Order(size=6400, batch_size=64)


class Trial:
    """A trial whose steps take as long as the device that decodes needs."""

    def __init__(self, cuda: float, cpu: float, position: Position | None = None) -> None:
        self.timeline = GivenTime()
        self.run = run_of(timeline=self.timeline)
        self.position = position or Position()
        self.present = DecodeDevice("cuda")
        self.trial = DecodeTrial(self.run, self.position, self.present)
        self._seconds = {"cuda": cuda, "cpu": cpu}

    def steps(self, first: int, number: int) -> list[str]:
        """Begin steps; return where their batches are decoded."""
        devices = []
        for step in range(first, first + number):
            self.trial.begin_step(ORDER.place(0, step, 0, 1))
            devices.append(self.present.name)
            self.timeline.passes(self._seconds[self.present.name])
        return devices


@pytest.mark.parametrize(
    ("cuda", "cpu", "chosen"), [(0.06, 0.1, "cuda"), (0.1, 0.06, "cpu"), (0.1, 0.101, "cpu")]
)
def test_the_device_with_the_shorter_steps_is_kept(cuda: float, cpu: float, chosen: str) -> None:
    trial = Trial(cuda, cpu)
    devices = trial.steps(0, 60)
    assert devices == ["cuda"] * 14 + ["cpu"] * 18 + [chosen] * 28
    assert trial.position.decode_device == chosen


def test_slow_first_steps_do_not_count() -> None:
    trial = Trial(0.06, 0.1)
    trial.steps(0, 2)
    trial.timeline.passes(30)  # the kernels are compiled
    trial.steps(2, 15)
    trial.timeline.passes(30)  # decode processes start
    assert trial.steps(17, 40)[-1] == "cuda"


def test_a_resumed_run_keeps_the_decision() -> None:
    trial = Trial(0.06, 0.1, Position(decode_device="cpu"))
    assert set(trial.steps(30, 60)) == {"cpu"}


def test_a_new_generation_begins_the_trial_anew() -> None:
    trial = Trial(0.06, 0.1)
    assert trial.steps(0, 30)[-1] == "cpu"
    context = trial.run.context
    context.begin(replace(context.world.generation, token="another"))
    assert trial.steps(25, 60) == ["cuda"] * 14 + ["cpu"] * 18 + ["cuda"] * 28
