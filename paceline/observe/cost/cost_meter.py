"""Meter of what this process, and the machine as far as this process reports it, cost so far."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch

from paceline.observe.cost.energy import POWERCAP, Rapl, gpu_counter
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
        powercap: the folder of the machine's energy counters.
        clock: returns seconds since an arbitrary origin.

    Attributes:
        supervised: as given.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        supervised: bool,
        powercap: Path = POWERCAP,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.supervised = supervised
        self._root = os.getppid() if supervised else os.getpid()
        self._clock = clock
        self._began = self._polled = clock()
        self._rapl = Rapl(powercap)
        self._gpu_joules = gpu_counter(device) if device.type == "cuda" else None

    def event(self, name: str, **more: Any) -> None:
        """Read the counters from time to time."""
        if name == "step" and self._clock() - self._polled >= _POLL_S:
            self._polled = self._clock()
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
            gpu=0.0 if gpu is None else self._clock() - self._began,
            processor_energy=self._rapl.joules() if first else 0.0,
            gpu_energy=0.0 if gpu is None else gpu(),
        )


def total_usage(parts: Iterable[Usage]) -> Usage:
    """Return the sum of several usages; what one doesn't tell isn't known of all."""
    return Usage.of_values(map(sum, zip(*map(astuple, [Usage(), *parts]), strict=True)))
