"""The speed of a link is measured in seconds a byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.link_speed import seconds_per_byte
from tests.harness.twins.communicator import ThreadCommunicator, ThreadGroup

CPU = torch.device("cpu")


class Clock:
    """Clock that sums advance."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(ThreadCommunicator):
    """Communicator on which a sum takes 5 ms, and 2 ns a byte."""

    def __init__(self, group: ThreadGroup, rank: int, clock: Clock) -> None:
        super().__init__(group, rank)
        self.clock = clock

    def all_reduce(self, tensor: Tensor) -> Any:
        self.clock.now += 5e-3 + 2e-9 * tensor.nbytes
        return super().all_reduce(tensor)


def test_a_links_speed_is_measured_without_its_latency() -> None:
    clock = Clock()
    found = seconds_per_byte(Timed(ThreadGroup(1), 0, clock), clock)
    assert found == pytest.approx(2e-9)
