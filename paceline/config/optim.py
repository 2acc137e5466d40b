"""How a model is optimised: batch, epochs, learning rate, decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.rules import at_least, positive, within


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """SGD with Nesterov momentum and its schedule."""

    batch_size: int = 32
    """Images a step on one machine, over all its workers; an uneven share is fine."""

    num_epochs: int = 1000
    """Epochs to train."""

    base_learning_rate: float = 0.1
    """Learning rate at the start (after the warm-up)."""

    weight_decay: float = 1e-4
    """L2 penalty on the weights of convolutions and linear layers and on BatchNorm's scale."""

    momentum: float = 0.9
    """Nesterov momentum; 0 is plain SGD."""

    lr_policy: Literal["step", "cosine"] = "step"
    """step: a tenth every 30 epochs. cosine: to 0 at the last step."""

    warmup_epochs: float = 0.0
    """Epochs in which the learning rate rises linearly from near 0."""

    scale_lr: bool = False
    """Multiply the learning rate by (batch of all machines / 256), the linear rule."""

    label_smoothing: float = 0.0
    """Share of the target spread over all classes."""

    no_bn_decay: bool = False
    """Leave BatchNorm's scale out of the weight decay."""

    clip_norm: float = 0.0
    """Largest norm of all gradients together; larger ones are scaled down. 0 is off."""

    clip_value: float = 0.0
    """Largest absolute value of a gradient's element; larger ones are cut. 0 is off."""

    max_loss: float = 40.0
    """Stop when a step's loss is larger, or not a number; 0 stops at the latter only."""

    seed: int = 0
    """Start of all random choices: initial weights, order, augmentation."""

    def __post_init__(self) -> None:
        at_least("batch_size", self.batch_size, 1)
        at_least("num_epochs", self.num_epochs, 1)
        positive("base_learning_rate", self.base_learning_rate)
        at_least("weight_decay", self.weight_decay, 0)
        within("momentum", self.momentum, 0, 1)
        at_least("warmup_epochs", self.warmup_epochs, 0)
        for flag in ("clip_norm", "clip_value", "max_loss"):
            at_least(flag, getattr(self, flag), 0)
        within("label_smoothing", self.label_smoothing, 0, 1)
        within("seed", self.seed, 0, 2**63)
