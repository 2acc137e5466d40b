"""The formats of `paceline export`: each writes a model to a file, and reads it again to run it.

torch           a plain state dict with its description, as a run's weights are
safetensors     the same tensors; the description is JSON in the metadata
onnx            a graph with the weights, for onnxruntime and others
torch-export    a graph with the weights, for torch.export.load
caffe2          a minidb of Caffe2's networks
"""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from paceline.config.export import ExportFormat
from paceline.errors import ConfigError
from paceline.inference.export.caffe2_net import is_caffe2s, write_caffe2
from paceline.inference.trained_model import TrainedModel
from paceline.models.error_origin import described as described_error
from paceline.state.weights import described, load_weights
from paceline.state.weights_about import describe
from paceline.wiring.model import make_model

INPUT = "images"
OUTPUT = "logits"
BATCH = "batch"  # name of the dimension of any size
_UNKNOWN_TO_ONNX = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Format:
    """Format of an exported file: how it is written, and read again to run it.

    Attributes:
        suffix: of a file's name.
        extra: of Paceline, which installs the packages; "": none is needed.
        packages: that are imported.
        write: writes a model to a file.
        read: reads a file, and returns what computes logits.
        usage: how to use a file, given its name.
    """

    suffix: str
    extra: str = ""
    packages: tuple[str, ...] = ()
    write: Callable[[BinaryIO, Exported], None]
    read: Callable[[Path, TrainedModel], Run]
    usage: str


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Model to write, and its description.

    Attributes:
        trained: the model, on the CPU.
        module: maps images, (n, channels, image_size, image_size), to logits.
    """

    trained: TrainedModel
    module: nn.Module

    @property
    def about(self) -> dict[str, Any]:
        """The model's description: of one that normalises itself, nothing is left to subtract."""
        config = self.trained.config
        if isinstance(self.module, Normalizing):
            data = replace(config.data, image_mean_per_channel=(0.0,), image_std_per_channel=(1.0,))
            config = replace(config, data=data)
        return describe(config, self.trained.classes)


class Normalizing(nn.Module):
    """Model that normalises pixels from 0 to 255 itself.

    Args:
        model: gets the normalised images.
        mean: of each channel, from 0 to 255.
        std: of each channel.
    """

    scale: Tensor
    offset: Tensor

    def __init__(self, model: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.model = model
        means = torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1)
        stds = torch.tensor(std, dtype=torch.float64).view(-1, 1, 1)
        self.register_buffer("scale", (1 / stds).float())  # as `Upload` computes
        self.register_buffer("offset", (-means / stds).float())

    def forward(self, images: Tensor) -> Tensor:
        """Map float32 pixels, (n, channels, h, w), to logits."""
        logits: Tensor = self.model(images * self.scale + self.offset)
        return logits


def require_format(name: ExportFormat, trained: TrainedModel) -> Format:
    """Return a format that a model can be written in.

    Raises:
        ConfigError: a package isn't installed, or Caffe2 has no such model.
    """
    chosen = FORMATS[name]
    missing = [package for package in chosen.packages if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"--format {name} needs the package {missing[0]}, which isn't installed: run pip "
            f"install 'paceline[{chosen.extra}]'."
        )
    if name == "caffe2" and not is_caffe2s(trained.model):
        raise ConfigError(
            f"--format caffe2: Caffe2's trainer has no {trained.config.model.name}, but resnet50, "
            "resnet101 and resnet152: give another --format."
        )
    return chosen


def _write_torch(file: BinaryIO, exported: Exported) -> None:
    torch.save(described(exported.trained.model.state_dict(), exported.about), file)


def _write_safetensors(file: BinaryIO, exported: Exported) -> None:
    from safetensors.torch import save

    state = exported.trained.model.state_dict()
    values = {name: value.clone().contiguous() for name, value in state.items()}
    about = {name: json.dumps(value) for name, value in exported.about.items()}
    file.write(save(values, about))


def _write_caffe2(file: BinaryIO, exported: Exported) -> None:
    write_caffe2(file, exported.trained.model, exported.trained.config.data.image_size)


def _write_onnx(file: BinaryIO, exported: Exported) -> None:
    program = _traced("onnx", exported)
    with _quiet():
        try:
            converted = torch.onnx.export(
                program,
                dynamo=True,
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes=({0: BATCH},),  # names the dimension, which is "s77" without
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            unknown = _UNKNOWN_TO_ONNX.search(str(error))
            reason = (
                f"ONNX has no operation for {unknown[1]}, which the model calls"
                if unknown
                else described_error(error)
            )
            raise ConfigError(f"--format onnx: {reason}; give another --format.") from error
    assert converted is not None
    proto = converted.model_proto
    for name, value in exported.about.items():
        proto.metadata_props.add(key=name, value=json.dumps(value))
    file.write(proto.SerializeToString())


def _write_torch_export(file: BinaryIO, exported: Exported) -> None:
    program = _traced("torch-export", exported)
    extra = {"about.json": json.dumps(exported.about)}
    content = io.BytesIO()
    with _quiet():
        torch.export.save(program, content, extra_files=extra)
    file.write(content.getbuffer())


def _traced(name: str, exported: Exported) -> torch.export.ExportedProgram:
    """Trace a model for batches of any size.

    Raises:
        ConfigError: it can't be traced.
    """
    data = exported.trained.config.data
    images = torch.zeros(2, data.num_channels, data.image_size, data.image_size)
    sizes = ({0: torch.export.Dim(BATCH)},)
    with _quiet():
        try:
            return torch.export.export(exported.module, (images,), dynamic_shapes=sizes)
        except Exception as error:  # torch's tracers raise anything
            raise ConfigError(
                f"--format {name}: torch.export can't trace the model for batches of any size "
                f"({described_error(error)}); give --format safetensors, or change its forward."
            ) from error


def _read_weights(path: Path, trained: TrainedModel) -> Run:
    model = make_model(trained.config, trained.device).eval()
    load_weights(path, model, flag="output", whole=True)
    return model


def _read_onnx(path: Path, trained: TrainedModel) -> Run:
    from onnxruntime import InferenceSession

    session = InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {INPUT: images.numpy()})[0])


def _read_torch_export(path: Path, trained: TrainedModel) -> Run:
    with _quiet(), path.open("rb") as file:
        return torch.export.load(io.BytesIO(file.read())).module()


@contextmanager
def _quiet() -> Iterator[None]:
    """Show no warnings and lines of torch's tracers: they are about torch itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


FORMATS: Mapping[ExportFormat, Format] = {
    "torch": Format(
        suffix=".pt",
        write=_write_torch,
        read=_read_weights,
        usage='model.load_state_dict(torch.load("{}", weights_only=True))',
    ),
    "safetensors": Format(
        suffix=".safetensors",
        extra="safetensors",
        packages=("safetensors",),
        write=_write_safetensors,
        read=_read_weights,
        usage='model.load_state_dict(safetensors.torch.load_file("{}"))',
    ),
    "onnx": Format(
        suffix=".onnx",
        extra="onnx",
        packages=("onnx", "onnxscript", "onnxruntime"),
        write=_write_onnx,
        read=_read_onnx,
        usage=f'onnxruntime.InferenceSession("{{}}").run(None, {{{{"{INPUT}": x}}}})',
    ),
    "torch-export": Format(
        suffix=".pt2",
        write=_write_torch_export,
        read=_read_torch_export,
        usage='torch.export.load("{}").module()(x)',
    ),
    "caffe2": Format(
        suffix=".mdl",
        write=_write_caffe2,
        read=_read_weights,
        usage='predictor_exporter.load_from_db("{}", "minidb")',
    ),
}
