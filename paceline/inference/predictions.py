"""Predictions for image files: a stream of batches, decoded ahead by decode processes.

    paths ──▶ decode processes ──▶ batch on the device ──▶ model ──▶ the likeliest classes
              the next two batches are begun meanwhile

Images are cut, scaled and normalised as in the evaluation of the training. Memory is bounded by the
batches in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from paceline.data.batch_maker import BatchMaker, Making
from paceline.data.decoding.decode_pool import DecodePool
from paceline.data.decoding.host_batches import HostBatches
from paceline.data.image.image_paths import ImageFiles
from paceline.data.order import Indices
from paceline.data.source import Source
from paceline.data.upload import Upload
from paceline.errors import DataError
from paceline.inference.decode_count import decode_processes
from paceline.inference.trained_model import TrainedModel
from paceline.wiring.samples import normalisation, sample_maker

_AHEAD = 3  # batches that are begun
_LIMIT_S = 600.0  # for the decoding of a batch


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says of an image.

    Attributes:
        path: the image's.
        labels: the likeliest classes, the likeliest first; none if the image can't be read.
        probabilities: theirs.
        error: why the image can't be read; None: it can.
    """

    path: str
    labels: Sequence[int] = ()
    probabilities: Sequence[float] = ()
    error: str | None = None


def predict(
    trained: TrainedModel, paths: Sequence[str], *, top: int, batch_size: int, workers: int | None
) -> Generator[Prediction, None, None]:
    """Yield the predictions for images, in their order; `close()` it to stop early.

    Args:
        trained: the model.
        paths: of image files.
        top: how many classes an image, at most all.
        batch_size: images that the model gets at once.
        workers: decode processes, beside a thread of this process; None: one a core but one, and
            none for few images.

    Raises:
        ConfigError: the model fails.
        DataError: decode processes can't go on, or a disk doesn't respond.
    """
    count = len(paths)
    ranges = (np.arange(at, min(at + batch_size, count)) for at in range(0, count, batch_size))
    batches = image_batches(trained, ImageFiles(paths), ranges, decode_processes(count, workers))
    with closing(batches):
        for making, images in batches:
            yield from _predictions(paths, making, _likeliest(trained, images, top))


def image_batches(
    trained: TrainedModel, source: Source, ranges: Iterator[Indices], processes: int
) -> Generator[tuple[Making, Tensor | None], None, None]:
    """Yield batches of images as the model gets them, and None for one of unreadable images alone.

    Args:
        trained: the model.
        source: the images.
        ranges: the records of each batch.
        processes: decode processes, beside a thread of this process.

    Raises:
        DataError: decode processes can't go on, or a disk doesn't respond.
    """
    data = trained.config.data
    pool = DecodePool(processes, cuda=trained.device.type == "cuda", thread=True)
    layout = trained.config.model.channels_last
    pixels = normalisation(data, trained.device, channels_last=layout)
    upload = Upload(**pixels, channels=data.num_channels, width=data.image_size)
    samples = sample_maker(data, source, train=False, labelled=False)
    batches = HostBatches(pool, samples, upload)
    try:
        for making in _made(batches, ranges):
            yield making, _images(batches, making)
    finally:
        pool.close()


def _made(batches: BatchMaker, ranges: Iterator[Indices]) -> Iterator[Making]:
    """Yield batches of samples that are made; each is released before the next one."""
    begun = deque(batches.begin(0, records) for records in islice(ranges, _AHEAD))
    while begun:
        making = begun.popleft()
        if not batches.wait([making], _LIMIT_S):
            raise DataError(
                f"a batch of images wasn't read within {_LIMIT_S:g} s: the disk or network doesn't "
                "respond; repair it, and start the command again."
            )
        yield making
        begun.extend(batches.begin(0, records) for records in islice(ranges, 1))


def _images(batches: BatchMaker, making: Making) -> Tensor | None:
    """Return the readable images of a batch on the device; None: there is none."""
    good = [at for at, record in enumerate(making.records.tolist()) if record not in making.bad]
    if not good:
        batches.release(making, None)
        return None
    uploaded = batches.on_device([(making, np.asarray(good))])
    batches.release(making, uploaded.copied)
    return uploaded.images


def _likeliest(
    trained: TrainedModel, images: Tensor | None, top: int
) -> Iterator[tuple[list[float], list[int]]]:
    """Return the probabilities and the labels of the likeliest classes, for each image."""
    if images is None:
        return iter(())
    with torch.no_grad():
        shares = trained.predictor.logits(images).float().softmax(1)
        best = shares.topk(min(top, shares.shape[1]))
    return zip(best.values.tolist(), best.indices.tolist(), strict=True)


def _predictions(
    paths: Sequence[str], making: Making, rows: Iterator[tuple[list[float], list[int]]]
) -> Iterator[Prediction]:
    for record in making.records.tolist():
        path = paths[record]
        if record in making.bad:
            yield Prediction(path=path, error=str(making.bad[record]))
            continue
        shares, labels = next(rows)
        yield Prediction(path=path, labels=labels, probabilities=shares)
