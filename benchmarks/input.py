"""Images a second by number of decode processes, and what they cost the training step beside them.

    python benchmarks/input.py [--quick] [--sections rate,step]

`rate`: one LMDB of 500 × 375 JPEG files, short side to 256, a random crop of 224, mirrored or not;
batches are taken as bytes. For n from 1 to the machine's cores, interleaved:

    Paceline     n decode processes, the queue and the shared buffers
    floor        n bare processes that make the same samples of the same records and drop them
    DataLoader   torch's with n worker processes and Pillow; the usual recipe of ImageNet training

`step`: a CPU training step (ResNet-18, 64 × 64, one thread) that takes a batch of photographs from
one decode process, beside the same step while a bare process makes as many of the same samples.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch
from command_line import Options, run_script
from photographs import HEIGHT, WIDTH, write_photographs
from PIL import Image
from rounds import interleaved, median_of, paired_ratio
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from paceline.data.db.open_database import open_database
from paceline.data.decoding.decode_pool import DecodePool
from paceline.data.image.augment import Transform
from paceline.data.sample_maker import SampleMaker
from paceline.data.upload import Upload
from paceline.models.zoo import build_model

SIZE, SCALE = 224, 256
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # ImageNet's, of 0..255
BATCH = 64  # of `rate`
AHEAD = 2  # batches made ahead, as in training
STEP_BATCH, STEP_SIZE = 16, 64  # of the step's model; it takes as many photographs
CPU = torch.device("cpu")
FORK = multiprocessing.get_context("fork")


def main() -> None:
    arguments = _parser().parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "photographs"
        records, distinct = (256, 8) if arguments.quick else (2048, 64)
        sizes = write_photographs(folder, records, distinct)
        cores = len(os.sched_getaffinity(0))
        print(
            f"JPEG files of {WIDTH} x {HEIGHT}, {min(sizes) // 1000} to {max(sizes) // 1000} KB; "
            f"{cores} cores; {arguments.rounds} rounds"
        )
        if "rate" in arguments.sections:
            for workers in range(1, cores + 1):
                _print_rates(folder, workers, arguments.rounds, 4 if arguments.quick else 20)
        if "step" in arguments.sections:
            _print_steps(folder, arguments.rounds, 2 if arguments.quick else 12)


def sample_maker(folder: Path) -> SampleMaker:
    """Make the sample maker of the photographs, in training form."""
    return SampleMaker(
        source=open_database(folder, "lmdb"),
        transform=Transform(augment="caffe2", image_size=SIZE, scale=SCALE),
        fill=np.full(3, 128, np.uint8),
        num_labels=1000,
    )


def records_of(batch: int, count: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the records of a batch."""
    return np.arange(batch * count, (batch + 1) * count, dtype=np.int64) % size


@contextmanager
def decode_pool(folder: Path, workers: int) -> Iterator[Callable[[int], Iterator[Tensor]]]:
    """Open Paceline's decode processes; give a function that yields batches of bytes for ever."""
    maker = sample_maker(folder)
    pool = DecodePool(workers)
    number = pool.add(maker)

    def batches(count: int) -> Iterator[Tensor]:
        begun = deque(
            pool.begin(number, 0, records_of(batch, count, len(maker.source)))
            for batch in range(AHEAD + 1)
        )
        batch = AHEAD
        while True:
            work = begun.popleft()
            assert pool.wait([work], 60)
            yield torch.from_numpy(work.buffer.samples).view(count, SIZE, SIZE, 3)
            pool.release(work)
            batch += 1
            begun.append(pool.begin(number, 0, records_of(batch, count, len(maker.source))))

    try:
        yield batches
    finally:
        pool.close()
        maker.source.close()


def paceline(folder: Path, workers: int, timed: int) -> float:
    """Measure images a second of decode processes, once all have begun."""
    with decode_pool(folder, workers) as batches:
        stream = batches(BATCH)
        for _ in range(AHEAD + 2):
            next(stream)
        begun = time.perf_counter()
        for _ in range(timed):
            next(stream)
        return timed * BATCH / (time.perf_counter() - begun)


def bare(folder: Path, workers: int, timed: int) -> float:
    """Measure images a second of bare processes that make samples and drop them."""
    start = FORK.Barrier(workers + 1)
    share = timed * BATCH // workers
    processes = [
        FORK.Process(target=_make_and_drop, args=(folder, share, worker, start))
        for worker in range(workers)
    ]
    for process in processes:
        process.start()
    start.wait()
    begun = time.perf_counter()
    for process in processes:
        process.join()
    return workers * share / (time.perf_counter() - begun)


def _make_and_drop(folder: Path, count: int, worker: int, start: object) -> None:
    torch.set_num_threads(1)
    maker = sample_maker(folder)
    slot = np.empty((SIZE, SIZE, 3), np.uint8)
    _make(maker, records_of(0, 8, len(maker.source)), slot)
    start.wait()  # type: ignore[attr-defined]
    _make(maker, records_of(worker, count, len(maker.source)), slot)


def _make(
    maker: SampleMaker,
    records: np.ndarray[tuple[int], np.dtype[np.int64]],
    slot: np.ndarray[tuple[int, int, int], np.dtype[np.uint8]],
) -> None:
    for record, numbers in zip(records.tolist(), maker.numbers(0, records), strict=True):
        maker.write(record, numbers, slot)


def dataloader(folder: Path, workers: int, timed: int) -> float:
    """Measure images a second of torch's DataLoader with Pillow; it yields bytes, too."""
    dataset = PillowDataset(folder, as_bytes=True)
    warm_up = 2 * workers
    sampler = SubsetRandomSampler([i % len(dataset) for i in range((timed + 2 * warm_up) * BATCH)])
    batches = iter(DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers))
    for _ in range(warm_up):
        next(batches)
    begun = time.perf_counter()
    for _ in range(timed):
        next(batches)
    seconds = time.perf_counter() - begun
    for _ in batches:  # to the end, so that it leaves nothing running beside the next one
        pass
    return timed * BATCH / seconds


class PillowDataset(Dataset[tuple[Tensor, int]]):
    """ImageNet's usual recipe, in torchvision's steps and without its overhead."""

    def __init__(self, folder: Path, *, as_bytes: bool = False) -> None:
        self._source = open_database(folder, "lmdb")
        self._mean = torch.tensor(MEAN).view(3, 1, 1) / 255
        self._std = torch.tensor(STD).view(3, 1, 1) / 255
        self._as_bytes = as_bytes

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        record = self._source[index]
        assert isinstance(record.image, bytes)
        image = Image.open(io.BytesIO(record.image)).convert("RGB")
        scale = SCALE / min(image.size)
        width, height = round(image.width * scale), round(image.height * scale)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = random.randint(0, width - SIZE), random.randint(0, height - SIZE)
        image = image.crop((left, top, left + SIZE, top + SIZE))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        if self._as_bytes:
            return pixels, record.label
        return pixels.to(torch.float32).div_(255).sub_(self._mean).div_(self._std), record.label


class TrainingStep:
    """A training step on the CPU, which also normalises a batch of photographs."""

    def __init__(self) -> None:
        self._model = build_model("resnet18", num_labels=10, num_channels=3).to(
            memory_format=torch.channels_last
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)
        self._inputs = torch.randn(STEP_BATCH, 3, STEP_SIZE, STEP_SIZE)
        self._labels = torch.randint(0, 10, (STEP_BATCH,))
        self._upload = Upload(
            mean=MEAN, std=STD, channels=3, width=SIZE, device=CPU, channels_last=True
        )

    def __call__(self, photographs: Tensor) -> None:
        self._upload([(photographs, self._labels)])
        functional.cross_entropy(self._model(self._inputs), self._labels).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def beside_paceline(folder: Path, step: TrainingStep, steps: int) -> float:
    """Measure a step, in ms, that takes its photographs from one decode process."""
    with decode_pool(folder, 1) as batches:
        stream = batches(STEP_BATCH)
        return _step_ms(lambda: step(next(stream)), steps)


def beside_bare(folder: Path, step: TrainingStep, steps: int) -> float:
    """Measure a step, in ms, while a bare process makes as many samples."""
    ours, its = FORK.Pipe()
    process = FORK.Process(target=_make_on_request, args=(folder, its))
    process.start()
    photographs = torch.zeros(STEP_BATCH, SIZE, SIZE, 3, dtype=torch.uint8)
    for _ in range(AHEAD):
        ours.send_bytes(b"a batch")

    def one() -> None:
        ours.send_bytes(b"a batch")
        ours.recv_bytes()
        step(photographs)

    try:
        return _step_ms(one, steps)
    finally:
        ours.send_bytes(b"")
        process.join()


def _make_on_request(folder: Path, requests: Connection) -> None:
    torch.set_num_threads(1)
    maker = sample_maker(folder)
    slot = np.empty((SIZE, SIZE, 3), np.uint8)
    batch = 0
    while requests.recv_bytes():
        _make(maker, records_of(batch, STEP_BATCH, len(maker.source)), slot)
        requests.send_bytes(b"made")
        batch += 1


def _step_ms(one: Callable[[], None], steps: int) -> float:
    for _ in range(4):
        one()
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        one()
        times.append(time.perf_counter() - begun)
    return 1000 * median(times)


def _print_rates(folder: Path, workers: int, rounds: int, timed: int) -> None:
    contenders = {
        "Paceline": partial(paceline, folder, workers, timed),
        "floor": partial(bare, folder, workers, timed),
        "DataLoader": partial(dataloader, folder, workers, timed),
    }
    rates = interleaved(contenders, rounds)
    print(f"\nprocesses: {workers:<17}{'images/s':>9}   Paceline's rate / its rate, 95 %")
    for name, values in rates.items():
        ratio = "" if name == "Paceline" else str(paired_ratio(rates["Paceline"], values))
        print(f"{name:28}{median(values):9.0f}   {ratio}")


def _print_steps(folder: Path, rounds: int, steps: int) -> None:
    step = TrainingStep()
    times = interleaved(
        {
            "beside a decode process": partial(beside_paceline, folder, step, steps),
            "beside a bare process": partial(beside_bare, folder, step, steps),
        },
        rounds,
    )
    print(f"\n{'training step on the CPU':28}{'ms':>9}   its time / beside a bare process, 95 %")
    for name, values in times.items():
        ratio = "" if "bare" in name else str(paired_ratio(values, times["beside a bare process"]))
        print(f"{name:28}{median_of(values).median:9.1f}   {ratio}")


def _parser() -> Options:
    parser = Options(__doc__, quick="short rounds, to see that it runs")
    parser.add("--rounds", type=int, default=11)
    parser.add(
        "--sections",
        type=lambda text: text.split(","),
        default=["rate", "step"],
        help="default: rate,step",
    )
    return parser


if __name__ == "__main__":
    run_script(main)
