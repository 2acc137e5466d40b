"""Meter of the processor time, GPU time and energy that a worker, or its machine, has used."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import Any, Self

import torch

from paceline.observe.cost.energy import Rapl, gpu_counter
from paceline.observe.cost.processes import processor_seconds, running_seconds
from paceline.recorder import NullRecorder

_POLL_S = 30.0  # between two looks at counters that wrap around


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Usage since a start: times in seconds, energy in joules; NaN: the machine doesn't report it.

    Attributes:
        processor: the processor time of all processes.
        machine: the time of machines.
        gpu: the time of GPUs.
        processor_energy: of processors and memory.
        gpu_energy: of GPUs.
    """

    processor: float = 0.0
    machine: float = 0.0
    gpu: float = 0.0
    processor_energy: float = 0.0
    gpu_energy: float = 0.0

    @classmethod
    def of_values(cls, values: Iterable[float]) -> Self:
        """Return the usage with these values, in the order of the attributes."""
        return cls(**{one.name: value for one, value in zip(fields(cls), values, strict=True)})


class CostMeter(NullRecorder):
    """Meter of a worker, which polls counters that wrap around at the event `step`.

    Args:
        device: where the worker computes.
        supervised: whether the process that started this one started all processes of the run on
            this machine. The first worker of a machine then reports them all, those that were
            killed, too. Otherwise each worker reports itself and what it started.

    Attributes:
        supervised: as given.
    """

    def __init__(self, device: torch.device, *, supervised: bool) -> None:
        self.supervised = supervised
        self._root = os.getppid() if supervised else os.getpid()
        self._began = self._polled = time.monotonic()
        self._rapl = Rapl()
        self._gpu_joules = gpu_counter(device) if device.type == "cuda" else None

    def event(self, name: str, **more: Any) -> None:
        """Read the counters from time to time."""
        if name == "step" and time.monotonic() - self._polled >= _POLL_S:
            self._polled = time.monotonic()
            self._rapl.joules()

    def usage(self, *, first: bool) -> Usage:
        """Return the usage that this worker reports.

        Args:
            first: the worker is the first one of its machine, which reports the machine.
        """
        seconds = 0.0
        if first or not self.supervised:
            seconds = processor_seconds(self._root)
        gpu = self._gpu_joules
        return Usage(
            processor=seconds,
            machine=running_seconds(self._root) if first else 0.0,
            gpu=0.0 if gpu is None else time.monotonic() - self._began,
            processor_energy=self._rapl.joules() if first else 0.0,
            gpu_energy=0.0 if gpu is None else gpu(),
        )


def total_usage(parts: Iterable[Usage]) -> Usage:
    """Return the sum of several usages; what is unknown of one is unknown of all."""
    return Usage.of_values(map(sum, zip(*map(astuple, [Usage(), *parts]), strict=True)))
