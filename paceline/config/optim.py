"""Configuration of the optimisation: batch, epochs, learning rate, decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.rules import at_least, positive, within
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, its learning-rate schedule, and the loss."""

    batch_size: int = 32
    """Batch size per machine, divided among its workers; it need not be divisible by their
    number."""

    num_epochs: int = 1000
    """Number of epochs to train."""

    target_accuracy: float = 0.0
    """End the run once an evaluation's accuracy on the test data, from 0 to 1, is at least this. 0:
    train all epochs."""

    patience: int = 0
    """End the run after so many evaluations in a row without a better accuracy on the test data. 0:
    train all epochs."""

    base_learning_rate: float = 0.1
    """Initial learning rate (after warm-up, if any)."""

    optimizer: str = "sgd"
    """Name of the optimizer: torch's (sgd, adamw, adam, rmsprop, adafactor, …), or of the package
    pytorch_optimizer (lamb, lars, lion, …)."""

    optimizer_options: str = ""
    """Further options of the optimizer, names and values: "betas=(0.9, 0.95) eps=1e-6"."""

    weight_decay: float = 1e-4
    """L2 penalty on the weights of convolutions and linear layers and on BatchNorm's scale; the
    decoupled decay of optimizers that have it, such as adamw."""

    momentum: float = 0.9
    """Nesterov momentum of --optimizer sgd; 0 is plain SGD."""

    lr_policy: Literal["step", "cosine"] = "step"
    """step: multiply by 0.1 every 30 epochs. cosine: cosine decay to 0 at the last step."""

    warmup_epochs: float = 0.0
    """Number of epochs of linear warm-up."""

    scale_lr: bool = False
    """Multiply the learning rate by (global batch size / 256): the linear scaling rule."""

    ema: float = 0.0
    """Decay of an exponential moving average of the weights, such as 0.999, which is evaluated and
    written in their place. 0: none."""

    mixup: float = 0.0
    """Alpha of mixup, such as 0.2: each image, and its label, is mixed with another one's. 0: none.
    Each image then costs two decoded ones."""

    label_smoothing: float = 0.0
    """Label smoothing factor: the fraction of the target that is distributed over all classes."""

    no_bn_decay: bool = False
    """Exclude BatchNorm's scale from weight decay."""

    clip_norm: float = 0.0
    """Maximum global gradient norm; gradients with a larger norm are scaled down. 0 disables it."""

    clip_value: float = 0.0
    """Maximum absolute value of a gradient element; larger values are clipped. 0 disables it."""

    max_loss: float = 40.0
    """Stop if the loss of a step exceeds this value or is NaN or infinite; 0 checks only for NaN
    and infinity."""

    max_loss_at: Literal["step", "epoch"] = "step"
    """When --max_loss is checked: after each step, or only after the last step of each epoch, as in
    Caffe2. For the command resnet50_trainer, the default is "epoch"."""

    seed: int = 0
    """Random seed for initial weights, sample order and augmentation."""

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "num_epochs")
        at_least(self, 0, "patience")
        if not 0 <= self.target_accuracy <= 1:
            raise ConfigError(
                flag="target_accuracy",
                value=self.target_accuracy,
                rule="must be from 0 to 1",
                remedy="give 0.9 for 90%",
            )
        positive("base_learning_rate", self.base_learning_rate)
        within("momentum", self.momentum, 0, 1)
        at_least(self, 0, "weight_decay", "warmup_epochs", "clip_norm", "clip_value", "max_loss")
        at_least(self, 0, "mixup")
        within("ema", self.ema, 0, 1)
        within("label_smoothing", self.label_smoothing, 0, 1)
        within("seed", self.seed, 0, 2**63)
