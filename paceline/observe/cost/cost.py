"""Cost of a run so far, and the sentence that says it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from paceline.observe.cost.cost_meter import Usage

_KWH = 3.6e6  # joules
_FIELDS = ("processor_hours", "gpu_hours", "machine_hours", "processor_kwh", "gpu_kwh", "price")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a run, of all its starts; None: not known.

    Attributes:
        processor_hours: of all processes.
        gpu_hours: of all GPUs.
        machine_hours: of all machines.
        processor_kwh: the energy of processors and memory, of all that ran on their machines.
        gpu_kwh: the energy of the GPUs.
        price: by `--price_per_hour`, in its currency.
    """

    processor_hours: float
    gpu_hours: float
    machine_hours: float
    processor_kwh: float | None = None
    gpu_kwh: float | None = None
    price: float | None = None

    @classmethod
    def of_usage(cls, usage: Usage, price_per_hour: float) -> Self:
        """Return the cost of a usage; a price of 0 isn't known."""
        machine_hours = usage.machine / 3600
        return cls(
            processor_hours=usage.processor / 3600,
            gpu_hours=usage.gpu / 3600,
            machine_hours=machine_hours,
            processor_kwh=_known(usage.processor_energy),
            gpu_kwh=_known(usage.gpu_energy),
            price=price_per_hour * machine_hours or None,
        )

    @classmethod
    def of_event(cls, event: Mapping[str, Any]) -> Self:
        """Return the cost that an event `cost` records."""
        return cls(**{name: event[name] for name in _FIELDS})

    @property
    def texts(self) -> list[str]:
        """What is known of it, in words: hours, energy, price."""
        energy = [value for value in (self.processor_kwh, self.gpu_kwh) if value is not None]
        return [
            f"{self.processor_hours:.3g} processor hours",
            *([f"{self.gpu_hours:.3g} GPU hours"] if self.gpu_hours else []),
            *([f"{sum(energy):.3g} kWh"] if energy else []),
            *([] if self.price is None else [f"price {self.price:,.2f}"]),
        ]


def _known(joules: float) -> float | None:
    """Return an energy in kWh; None where it isn't known, or nothing uses it."""
    return None if math.isnan(joules) or not joules else joules / _KWH
