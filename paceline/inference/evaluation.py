"""Evaluation of a trained model on a database: loss, accuracies, confusion matrix.

The batches are cut as those of the run's own evaluations were: a slice for each of its workers,
each computed by as many threads as a worker had. So the results are the run's own, bit for bit: a
kernel's sums depend on the images that it gets at once, and on its threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

import torch
from torch import Tensor, nn

from paceline.data.decoding.decode_pool import DecodePool
from paceline.data.decoding.host_batches import HostBatches
from paceline.data.loader import Batch, DatabaseLoader
from paceline.data.order import Order
from paceline.data.ordered_map import Meter
from paceline.data.source import Source
from paceline.data.upload import Upload
from paceline.inference.decode_count import decode_processes
from paceline.inference.trained_model import TrainedModel
from paceline.observe.score_counter import Scores
from paceline.run.predictor import EvaluationSums, evaluated
from paceline.wiring.samples import normalisation, sample_maker

_AHEAD = 2  # slices that are begun

_Compute = Callable[[Callable[[Batch], Tensor], Sequence[Batch]], Iterable[Tensor]]


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
    sums = EvaluationSums(trained.predictor, criterion, workers, trained.device)
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
        with _slices_at_once(trained, workers) as compute:
            for batches in _global_batches(loader, workers):
                for batch, logits in zip(batches, compute(sums.add, batches), strict=True):
                    if batch.place.count:
                        _count(confusion, batch.labels, logits)
                    done += batch.place.count + batch.place.skipped
                meter(done, order.samples)
    finally:
        loader.close()
        pool.close()
    return Evaluation(scores=evaluated(sums.rows), confusion=confusion)


@contextmanager
def _slices_at_once(trained: TrainedModel, workers: int) -> Iterator[_Compute]:
    """Yield what computes a batch's slices, beside each other as far as there are cores."""
    before = torch.get_num_threads()
    threads = min(trained.threads or before, before)
    if trained.device.type != "cpu" or threads == before:
        yield map
        return
    # OpenMP has a number of threads for each thread that calls it.
    initializer = partial(torch.set_num_threads, threads)
    with ThreadPoolExecutor(min(workers, before // threads), "evaluate", initializer) as pool:
        yield pool.map
    torch.set_num_threads(before)


def _global_batches(loader: DatabaseLoader, workers: int) -> Iterator[list[Batch]]:
    """Yield the slices of one global batch after the other, those that have images."""
    order = loader.order
    places = [
        [place for rank in range(workers) if (place := order.place(0, step, rank, workers)).count]
        for step in range(order.steps)
    ]
    ahead = deque(chain.from_iterable(places))
    for step in places:
        batches = []
        for place in step:
            ahead.popleft()
            batches.append(loader.batch(place, [*islice(ahead, _AHEAD)]))
        yield batches


def _count(confusion: Tensor, labels: Tensor, logits: Tensor) -> None:
    taken_for = logits.argmax(1)
    pairs = (labels * len(confusion) + taken_for).cpu()
    confusion += torch.bincount(pairs, minlength=confusion.numel()).view_as(confusion)


def most_confused(row: Sequence[int], label: int) -> int | None:
    """Return the class that images of a label were taken for most often, but their own; or None."""
    wrong = [0 if at == label else count for at, count in enumerate(row)]
    return wrong.index(max(wrong)) if any(wrong) else None
