"""Evaluation of a trained model on a database: loss, accuracies, and what is taken for what.

The batches are cut as those of the run's own evaluations were: a slice for each of its workers. So
images are in the same company, and the results are the run's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.data.batch_slice import BatchSlice
from paceline.data.decoding.decode_pool import DecodePool
from paceline.data.decoding.host_batches import HostBatches
from paceline.data.loader import Batch, DatabaseLoader
from paceline.data.order import Order
from paceline.data.ordered_map import Meter
from paceline.data.source import Source
from paceline.data.upload import Upload
from paceline.inference.decode_count import decode_processes
from paceline.inference.trained_model import TrainedModel
from paceline.observe.score_counter import BATCH_SUMS, Scores, add_scores, scores
from paceline.wiring.samples import normalisation, sample_maker

_AHEAD = 2  # batches that are begun


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        scores: mean loss and accuracies.
        confusion: (classes, classes) int64: how many images of a class, the row, were taken for
            which one, the column.
    """

    scores: Scores
    confusion: Tensor


def evaluate(
    trained: TrainedModel,
    source: Source,
    order: Order,
    *,
    workers: int,
    decode_workers: int | None,
    meter: Meter,
) -> Evaluation:
    """Evaluate a model.

    Args:
        trained: the model.
        source: the records.
        order: their order in an evaluation of the run, with its global batches.
        workers: the run's, among which each batch is divided.
        decode_workers: decode processes, beside a thread of this process; None: one a core but one.
        meter: is called with the number of images that are done, and of all.

    Raises:
        ConfigError: the model fails.
        DataError: a record is damaged and isn't to be skipped, or its label is out of range.
    """
    config = trained.config
    data = config.data
    classes = data.num_labels
    criterion = nn.CrossEntropyLoss(label_smoothing=config.optim.label_smoothing)
    sums = torch.zeros(BATCH_SUMS, dtype=torch.float64, device=trained.device)
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    processes = decode_processes(order.samples, decode_workers)
    pool = DecodePool(processes, cuda=trained.device.type == "cuda", thread=True)
    layout = config.model.channels_last
    pixels = normalisation(data, trained.device, channels_last=layout)
    upload = Upload(**pixels, channels=data.num_channels, width=data.image_size)
    maker = HostBatches(pool, sample_maker(data, source, train=False), upload)
    loader = DatabaseLoader(order, maker, skip_bad=data.bad_records == "skip")
    try:
        done = 0
        for batch in _batches(loader, workers):
            logits = trained.logits(batch.images)
            count = batch.place.count - batch.place.skipped
            add_scores(sums, criterion(logits, batch.labels), logits, batch.labels, count)
            if count:
                _count(confusion, batch.labels, logits)
            done += batch.place.count
            meter(done, order.samples)
    finally:
        loader.close()
        pool.close()
    return Evaluation(scores=scores(sums.tolist()), confusion=confusion)


def _batches(loader: DatabaseLoader, workers: int) -> Iterator[Batch]:
    places = [*_places(loader.order, workers)]
    for number, place in enumerate(places):
        yield loader.batch(place, places[number + 1 : number + 1 + _AHEAD])


def _places(order: Order, workers: int) -> Iterator[BatchSlice]:
    for step in range(order.steps):
        for rank in range(workers):
            place = order.place(0, step, rank, workers)
            if place.count:
                yield place


def _count(confusion: Tensor, labels: Tensor, logits: Tensor) -> None:
    taken_for = logits.argmax(1)
    pairs = (labels * len(confusion) + taken_for).cpu()
    confusion += torch.bincount(pairs, minlength=confusion.numel()).view_as(confusion)


def most_confused(row: Sequence[int], label: int) -> int | None:
    """Return the class that images of a label were taken for most often, but their own; or None."""
    wrong = [0 if at == label else count for at, count in enumerate(row)]
    return wrong.index(max(wrong)) if any(wrong) else None
