"""Configuration of the model: its name, precision and weights files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from paceline.config.rules import at_least, file_name


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model and numeric precision."""

    model: str = ""
    """Name of a built-in model (resnet18, …, resnet152; resnet20, resnet56 for CIFAR), of another
    package's (torchvision:NAME, timm:NAME, hf:NAME_OR_FOLDER; paceline zoo lists them), or
    package.module:function. The default, and Caffe2's value resnext, select
    resnet<num_layers>."""

    num_layers: int = 50
    """Number of layers of the ResNet, if --model is not given."""

    dtype: Literal["float", "float16", "bfloat16"] = "float"
    """Data type of forward and backward (autocast); weights remain float32,
    but for --param_dtype."""

    channels_last: bool = True
    """Use the contiguous memory format; the default, channels-last, is faster for convolutions."""

    force_bfloat16: bool = False
    """Use bfloat16 even if the processor has no native support and emulates it (slow)."""

    sync_bn: bool = False
    """Compute BatchNorm statistics over the global batch instead of each worker's slice."""

    compile: bool = False
    """Compile the blocks of the model with torch.compile; start-up takes minutes longer."""

    load_model_path: Annotated[str, arg(aliases=("--weights",))] = ""
    """Initialise the model from this file of weights: of a run, or any state dict of the model; or,
    for another package's model, from its published ones: pretrained, or their name. Caffe2's name
    of the flag is --load_model_path."""

    freeze: tuple[str, ...] = ()
    """Don't train the parameters of these names, in which * is any text: --freeze "layer1.*"
    "layer2.*". BatchNorm layers that are frozen keep their running statistics."""

    save_model_name: str = ""
    """Name of the weights file in the run's folder (default: <model>_model)."""

    def __post_init__(self) -> None:
        at_least(self, 1, "num_layers")
        if self.save_model_name:
            file_name("save_model_name", self.save_model_name)

    @property
    def name(self) -> str:
        """The model's name; the default, and Caffe2's resnext, is a ResNet of `--num_layers`."""
        return f"resnet{self.num_layers}" if self.model in ("", "resnext") else self.model

    @property
    def short_name(self) -> str:
        """The model's name, fit for a file's."""
        return self.name.rpartition(":")[2].rstrip("/").rpartition("/")[2]

    @property
    def weights_name(self) -> str:
        """The name of the weights file, without its ending."""
        return self.save_model_name or f"{self.short_name}_model"
