"""Configuration of `paceline plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.config.rules import at_least, positive, within
from paceline.errors import ConfigError, many

ScheduleName = Literal["gpipe", "1f1b", "zb-h1"]
_TASKS = 20_000  # simulated in some seconds


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Options of `paceline plan`."""

    stages: int
    """Number of stages of the pipeline."""

    microbatches: int | None = None
    """Microbatches of a step. None: four for each stage."""

    schedule: ScheduleName | None = None
    """Show this schedule only. None: show all."""

    forward_ms: tuple[float, ...] = (1.0,)
    """Milliseconds of a forward pass over one microbatch: one
    value for all stages, or one for each."""

    backward_ms: tuple[float, ...] | None = None
    """Milliseconds of a backward pass, likewise. None: twice the
    forward pass."""

    weight_ms: tuple[float, ...] | None = None
    """Milliseconds of the part of a backward pass that computes
    the gradients of weights, likewise: zb-h1 runs it apart.
    None: half the backward pass."""

    transfer_ms: tuple[float, ...] = (0.0,)
    """Milliseconds of sending a microbatch's activations to the
    next stage, or their gradients back: one value for all links,
    or one for each."""

    json: bool = False
    """Print the result as JSON, with the time of each task."""

    def __post_init__(self) -> None:
        at_least(self, 1, "stages")
        tasks = self.stages * self.microbatch_count
        if tasks > _TASKS:
            rule = f"a step of {tasks:,} forward passes is too long to plan, at most {_TASKS:,}"
            raise ConfigError(flag="microbatches", value=self.microbatch_count, rule=rule)
        for forward, backward, weight in self.passes_ms:
            positive("forward_ms", forward)
            positive("backward_ms", backward)
            positive("weight_ms", weight)
            within("weight_ms", weight, 0, backward, "it is a part of the backward pass")
        for transfer in self.links_ms:
            within("transfer_ms", transfer, 0, math.inf)

    @property
    def microbatch_count(self) -> int:
        """Microbatches of a step."""
        return 4 * self.stages if self.microbatches is None else self.microbatches

    @property
    def passes_ms(self) -> list[tuple[float, float, float]]:
        """By stage: forward pass, backward pass, and the weights' part of that."""
        forward = self._each("forward_ms", self.forward_ms, self.stages)
        backward = self._each("backward_ms", self.backward_ms, self.stages)
        backward = backward or [2 * value for value in forward]
        weight = self._each("weight_ms", self.weight_ms, self.stages)
        weight = weight or [value / 2 for value in backward]
        return list(zip(forward, backward, weight, strict=True))

    @property
    def links_ms(self) -> list[float]:
        """By stage, of its link to the next one: the milliseconds of a transfer."""
        return self._each("transfer_ms", self.transfer_ms, self.stages - 1)

    def _each(self, flag: str, values: tuple[float, ...] | None, count: int) -> list[float]:
        if values is not None and len(values) not in (1, count):
            rule = f"give one value, or {count:,}: there are {many(self.stages, 'stage')}"
            raise ConfigError(flag=flag, value=" ".join(f"{v:g}" for v in values), rule=rule)
        return [] if values is None else list(values * count)[:count]
