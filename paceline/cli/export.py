"""`paceline export RUN --format F`: the model of a run as a file for other programs, compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from rich.console import Console

from paceline.cli.active_run.find_run import find_run_or_weights
from paceline.cli.flags import parse
from paceline.cli.output_file import check_output
from paceline.cli.progress import meter
from paceline.cli.run_images import open_test_data
from paceline.config.export import ExportConfig
from paceline.data.image.image_paths import ImageFiles, find_images
from paceline.data.source import Source
from paceline.errors import ConfigError, Message
from paceline.inference.export.export import BATCHES, Comparison, export
from paceline.inference.export.formats import FORMATS, Format, require_format
from paceline.inference.trained_model import TrainedModel

_DESCRIPTION = """\
Write the model of a run to a file for other programs.

The file is read again and compared with the model on images before it gets its name.

Examples:
  paceline export digits --format safetensors
  paceline export digits --format onnx --normalize_inside --output digits.onnx
  paceline export runs/digits/resnet20_best.pt --format torch-export --images photos
  paceline export digits --weights runs/digits/checkpoints/step-00000128.json --output whole.pt"""


def main(argv: Sequence[str]) -> int:
    """Run the command after `paceline export`; return its exit status.

    Raises:
        ConfigError: there is no such run, the run has no weights, the model can't be expressed in
            the format, a package isn't installed, or the file is there already.
        PacelineError: a file or all images can't be read, the logits differ, or the disk is full.
        SystemExit: help was requested (0), or the arguments are wrong (2).
    """
    config = parse(ExportConfig, argv, prog="paceline export", description=_DESCRIPTION)
    folder, file = find_run_or_weights(config.run, Path(config.output_dir))
    trained = TrainedModel.read(folder, torch.device("cpu"), config.weights or file)
    chosen = require_format(config.format, trained)
    path = _path(config, chosen, trained)
    source: Source
    if config.images:
        source = ImageFiles(find_images(config.images))
    else:
        source = open_test_data(trained.config, folder, config.test_data, trained=True)
    with closing(source), meter("Comparing", "images", Console(stderr=True)) as shown:
        result = export(
            trained,
            chosen,
            path,
            source,
            images=config.num_images,
            normalize_inside=config.normalize_inside,
            meter=shown,
        )
    if config.json:
        print(json.dumps(_as_json(path, config, result)))
    else:
        print(_as_text(path, result))
        print(f"In Python: {chosen.usage.format(path)}")
    return 0


def _path(config: ExportConfig, chosen: Format, trained: TrainedModel) -> Path:
    """Return where the file is to be.

    Raises:
        ConfigError: there is one already, or no such folder that can be written.
    """
    path = Path(config.output or _default_path(chosen, trained))
    check_output("output", str(path))
    others = {one.suffix: name for name, one in FORMATS.items() if one is not chosen}
    if path.suffix in others:  # a program that goes by the name would read it as that format
        raise ConfigError(
            Message(
                "{--output} {}: the name is that of {--format} {}, and the file is of {--format} "
                "{}; end it in {}.",
                path,
                others[path.suffix],
                config.format,
                chosen.suffix,
            )
        )
    if path.exists() and path.samefile(trained.weights):
        raise ConfigError(Message("{} is what is exported: give another {--output}.", path))
    if path.exists() and not config.overwrite:
        raise ConfigError(
            Message("{} is there already: give another {--output}, or {--overwrite}.", path)
        )
    return path


def _default_path(chosen: Format, trained: TrainedModel) -> Path:
    weights = trained.weights
    path = weights.with_suffix(chosen.suffix)
    return weights.with_stem(f"{weights.stem}_export") if path == weights else path


def _as_text(path: Path, result: Comparison) -> str:
    sizes = f"{', '.join(map(str, BATCHES[:-1]))} and {BATCHES[-1]}"
    return (
        f"{path}: largest difference {result.difference:.2g} on {result.images:,} images, in "
        f"batches of {sizes}; the largest logit is {result.largest:.3g}"
    )


def _as_json(path: Path, config: ExportConfig, result: Comparison) -> dict[str, object]:
    return {
        "file": str(path),
        "format": config.format,
        "images": result.images,
        "largest_difference": result.difference,
        "largest_logit": result.largest,
    }
