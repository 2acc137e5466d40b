"""Which model is trained, in which precision, from and to which weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.rules import at_least, file_name


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model and its arithmetic."""

    model: str = ""
    """A name of the zoo (resnet18, …, resnet152; resnet20, resnet56 for CIFAR) or
    package.module:function; by default resnet with --num_layers."""

    num_layers: int = 50
    """Layers of the ResNet, where --model isn't given."""

    dtype: Literal["float", "float16", "bfloat16"] = "float"
    """Arithmetic of forward and backward, by autocast; weights stay float."""

    channels_last: bool = True
    """Images and convolution weights are in channels-last memory, the faster layout, or aren't."""

    force_bfloat16: bool = False
    """Compute in bfloat16 even where the processor only emulates it, slowly."""

    sync_bn: bool = False
    """BatchNorm over the whole global batch, not over each worker's share."""

    compile: bool = False
    """Compile the model's blocks by torch.compile; takes minutes at the start."""

    load_model_path: str = ""
    """Start from these weights: a file as saved by a run."""

    save_model_name: str = ""
    """Name of the file of weights in the run's folder; by default <model>_model."""

    def __post_init__(self) -> None:
        at_least("num_layers", self.num_layers, 1)
        if self.save_model_name:
            file_name("save_model_name", self.save_model_name)

    @property
    def name(self) -> str:
        """The model's name, `--num_layers` considered."""
        return self.model or f"resnet{self.num_layers}"

    @property
    def short_name(self) -> str:
        """The model's name, fit for a file's."""
        return self.name.rpartition(":")[2].rpartition(".")[2]

    @property
    def weights_name(self) -> str:
        """The name of the file of weights, without its ending."""
        return self.save_model_name or f"{self.short_name}_model"
