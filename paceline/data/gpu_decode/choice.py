"""Which device decodes, where `--decode_device auto` has measured both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_MARGIN = (
    1.02  # by which the GPU must be faster: the CPU's way gives the same bits on every machine
)


@dataclass(frozen=True, kw_only=True)
class DecodeRates:
    """Rates beside training, where one way decodes.

    Attributes:
        input: images/s that this way makes.
        step: images/s that the steps take while it does, where none waits for input.
    """

    input: float
    step: float

    @property
    def training(self) -> float:
        """Return the images/s of training: the slower of the two decides."""
        return min(self.input, self.step)


def faster_device(cpu: DecodeRates, cuda: DecodeRates) -> tuple[Literal["cpu", "cuda"], str]:
    """Choose by measured rates, which must be the same on all ranks.

    Returns:
        The device, and a sentence with the figures.
    """
    device: Literal["cpu", "cuda"]
    device = "cuda" if cuda.training > _MARGIN * cpu.training else "cpu"
    figures = ", ".join(
        f"{rates.training:,.0f} images/s by {name} (input {rates.input:,.0f}, steps "
        f"{rates.step:,.0f})"
        for name, rates in (("cpu", cpu), ("cuda", cuda))
    )
    return device, f"Images are decoded by {device}. Measured beside training: {figures}."
