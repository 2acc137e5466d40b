"""Configuration of `paceline export`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from paceline.config.rules import at_least
from paceline.errors import ConfigError

ExportFormat = Literal["torch", "safetensors", "onnx", "torch-export", "caffe2"]
_GRAPHS = ("onnx", "torch-export")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Options of `paceline export`."""

    run: Positional[Annotated[str, arg(metavar="RUN")]]
    """Folder or id of a run of `paceline train`, a file of weights
    that such a run has written, or the index of its checkpoint in
    parts."""

    format: ExportFormat = "torch"
    """torch: a plain state dict. safetensors: the same tensors.
    onnx, torch-export: weights and operations, for batches of any
    size. caffe2: the file of Caffe2's trainer, of resnet50, 101 and
    152."""

    output: str = ""
    """The file. By default beside the weights, under their name with
    the format's suffix, and with _export where that is the weights'
    own name."""

    output_dir: str = "runs"
    """Folder of all runs."""

    weights: str = ""
    """best: those after the run's best epoch. last: after its last
    one. Or a file of weights. By default the best ones, if the run
    has test data."""

    images: tuple[str, ...] = ()
    """Image files and folders on which the file is compared with the
    model. By default those of --test_data."""

    test_data: str = ""
    """Database whose images it is compared on. By default the run's
    test data, or its training data."""

    num_images: int = 500
    """How many of these images, evenly spread."""

    normalize_inside: bool = False
    """The file gets pixels from 0 to 255 as floats, and normalises
    them itself (onnx and torch-export)."""

    overwrite: bool = False
    """Replace a file that is there."""

    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        at_least(self, 1, "num_images")
        if self.normalize_inside and self.format not in _GRAPHS:
            raise ConfigError(
                f"--normalize_inside: a file of --format {self.format} has the weights alone: give "
                f"--format {' or '.join(_GRAPHS)}."
            )
        if self.images and self.test_data:
            raise ConfigError("--images and --test_data are both images to compare on: give one.")
