"""The learning rate as a pure function of the step, for torch's `LambdaLR`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

STEP_EPOCHS = 30  # Caffe2's resnet50_trainer: a tenth every 30 epochs
STEP_FACTOR = 0.1
LINEAR_RULE_BATCH = 256  # Goyal et al. 2017, https://arxiv.org/abs/1706.02677


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Learning-rate schedule: the factor of the base learning rate at each step.

    Attributes:
        policy: "step": divided by ten every 30 epochs; "cosine": half a cosine period, down to 0 at
            the end.
        steps_per_epoch: optimizer steps per epoch.
        epochs: number of epochs of the run.
        warmup_epochs: number of epochs of linear warmup: the policy's factor is multiplied by a
            factor that rises to 1.
    """

    policy: Literal["step", "cosine"]
    steps_per_epoch: int
    epochs: int
    warmup_epochs: float = 0.0

    def __call__(self, step: int) -> float:
        """Return the factor for a step, counted from 0."""
        warmup = self.warmup_epochs * self.steps_per_epoch
        rise = min(1.0, (step + 1) / warmup) if warmup > 0 else 1.0
        return rise * self._policy_rate(step, warmup)

    def _policy_rate(self, step: int, warmup: float) -> float:
        if self.policy == "step":
            return float(STEP_FACTOR ** (step // self.steps_per_epoch // STEP_EPOCHS))
        left = self.epochs * self.steps_per_epoch - warmup
        done = min(1.0, max(0.0, step - warmup) / max(1.0, left))
        return 0.5 * (1 + math.cos(math.pi * done))


def base_rate(rate: float, global_batch: int, *, scale: bool) -> float:
    """Return the base learning rate, by the linear rule times batch / 256 where asked."""
    return rate * global_batch / LINEAR_RULE_BATCH if scale else rate
