"""Export of a trained model: written, read again, and compared on images, before it has its name.

model ──▶ .NAME.part ──▶ read again ──▶ the same images ──▶ equal enough ──▶ NAME
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.atomic_write import atomic_file
from paceline.data.order import Indices
from paceline.data.ordered_map import Meter
from paceline.data.source import Source
from paceline.errors import DataError, PacelineError
from paceline.inference.decode_count import decode_processes
from paceline.inference.export.formats import Exported, Format, Normalizing, Run
from paceline.inference.predictions import image_batches
from paceline.inference.trained_model import TrainedModel
from paceline.run.precision import Precision
from paceline.run.predictor import Predictor

BATCHES = (1, 7, 64)  # images of the batches that are compared, by turns
TOLERANCE = 1e-4  # of the largest logit


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of a file's logits with the model's.

    Attributes:
        images: that both got.
        difference: the largest absolute one of all logits.
        largest: the largest absolute logit.
    """

    images: int
    difference: float
    largest: float


def export(
    trained: TrainedModel,
    chosen: Format,
    path: Path,
    source: Source,
    *,
    images: int,
    normalize_inside: bool,
    meter: Meter,
) -> Comparison:
    """Write a model to a file, which appears when it has been read again and compared.

    Args:
        trained: the model, on the CPU.
        chosen: the format.
        path: the file.
        source: the images on which it is compared.
        images: how many of them, evenly spread, at most.
        normalize_inside: whether the file gets pixels from 0 to 255 and normalises them.
        meter: is called with the number of images that are compared, and of all.

    Raises:
        ConfigError: the model can't be expressed in the format.
        DataError: no image can be read.
        PacelineError: the file's logits differ, or it can't be written.
    """
    data = trained.config.data
    model = trained.model
    raw: Normalizing | None = None
    if normalize_inside:
        mean = data.each_channel(data.image_mean_per_channel)
        raw = Normalizing(model, mean, data.each_channel(data.image_std_per_channel)).eval()
    with atomic_file(path) as file:
        chosen.write(file, Exported(trained=trained, module=raw or model))
        file.flush()
        run = chosen.read(Path(file.name), trained)
        result = _compare(trained, run, raw, source, images, meter)
        if not result.difference <= TOLERANCE * result.largest:
            raise PacelineError(
                f"{path}: its logits differ from the model's by up to {result.difference:.2g}, "
                f"more than {TOLERANCE:g} of the largest, {result.largest:.3g}, on "
                f"{result.images:,} images: nothing was written; give another --format."
            )
    return result


@torch.no_grad()
def _compare(
    trained: TrainedModel,
    run: Run,
    raw: Normalizing | None,
    source: Source,
    images: int,
    meter: Meter,
) -> Comparison:
    precision = Precision("float", trained.device)  # files have no autocast
    predictor = Predictor(
        model=trained.model, precision=precision, num_labels=trained.config.data.num_labels
    )
    records = np.unique(np.linspace(0, len(source) - 1, min(images, len(source))).astype(np.int64))
    done = 0
    difference = 0.0
    largest = 0.0
    processes = decode_processes(len(records), None)
    with closing(image_batches(trained, source, _ranges(records), processes)) as batches:
        for _, batch in batches:
            if batch is None:
                continue
            wanted = predictor.logits(batch)
            found = run(batch if raw is None else _pixels(batch, raw))
            # A NaN is no difference that a comparison would find.
            gap = (found - wanted).abs().max().nan_to_num(nan=torch.inf)
            difference = max(difference, gap.item())
            largest = max(largest, wanted.abs().max().item())
            done += len(batch)
            meter(done, len(records))
    if not done:
        raise DataError("no image can be read on which the file could be compared: give others.")
    return Comparison(images=done, difference=difference, largest=largest)


def _ranges(records: Indices) -> Iterator[Indices]:
    sizes = cycle(BATCHES)
    at = 0
    while at < len(records):
        size = next(sizes)
        yield records[at : at + size]
        at += size


def _pixels(images: Tensor, raw: Normalizing) -> Tensor:
    """Return the pixels, whole numbers from 0 to 255, of normalised images."""
    pixels: Tensor = ((images - raw.offset) / raw.scale).round()
    return pixels
