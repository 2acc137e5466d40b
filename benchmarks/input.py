"""Images a second a core: Paceline's loader beside `torch.utils.data.DataLoader` with Pillow.

    python benchmarks/input.py [--quick]

Both read one LMDB of 500 × 375 JPEG files through the same source and make the same thing of
them: short side to 256, a random crop of 224, mirrored or not, a normalised float tensor, batches
of 32. Everything runs on one core: Paceline's decode thread beside its caller; DataLoader in its
caller's process, and with a worker process beside it. DataLoader's recipe is the usual one of
ImageNet training: Pillow decodes, resizes the whole image and crops.

The floor is JPEG decoding alone, which nobody can do without.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import simplejpeg
import torch
from photographs import HEIGHT, WIDTH, write_photographs
from PIL import Image
from rounds import interleaved, paired_ratio
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from paceline.data.db.open_database import open_database
from paceline.data.image.augment import Transform
from paceline.data.loader import DatabaseLoader
from paceline.data.order import Order

BATCH, SIZE, SCALE = 32, 224, 256
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # ImageNet's, of 0..255
WARM_UP, AHEAD = 4, 4  # batches: not timed, and so many that nobody runs out of work at the end


def main() -> None:
    arguments = _parser().parse_args()
    rounds, timed = (3, 6) if arguments.quick else (arguments.rounds, 24)
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "photographs"
        records = BATCH * (WARM_UP + timed + AHEAD)
        sizes = write_photographs(folder, records, distinct=min(records, 64))
        print(
            f"{records} JPEG files of {WIDTH} x {HEIGHT}, {min(sizes) // 1000} to "
            f"{max(sizes) // 1000} KB; {rounds} rounds of {timed * BATCH} images; core {core} alone"
        )
        contenders = {
            "Paceline": partial(_rate, paceline, folder, timed),
            "DataLoader, in process": partial(_rate, partial(dataloader, workers=0), folder, timed),
            "DataLoader, 1 worker": partial(_rate, partial(dataloader, workers=1), folder, timed),
            "floor: JPEG decoding alone": partial(_rate, decoding, folder, timed),
        }
        _print(interleaved(contenders, rounds))


def paceline(folder: Path) -> Iterator[Tensor]:
    """Yield batches of images from Paceline's loader."""
    source = open_database(folder, "lmdb")
    loader = DatabaseLoader(
        source,
        Order(size=len(source), batch_size=BATCH),
        Transform(augment="caffe2", image_size=SIZE, scale=SCALE),
        mean=MEAN,
        std=STD,
        rank_and_size=lambda: (0, 1),
        device=torch.device("cpu"),
        threads=1,
        num_labels=1000,
    )
    try:
        for step in range(loader.steps):
            yield loader.batch(0, step).images
    finally:
        loader.close()
        source.close()


def dataloader(folder: Path, workers: int) -> Iterator[Tensor]:
    """Yield batches of images from torch's DataLoader with Pillow."""
    dataset = PillowDataset(folder)
    sampler = SubsetRandomSampler(range(len(dataset)))
    for images, _ in DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers):
        yield images


def decoding(folder: Path) -> Iterator[None]:
    """Decode a batch's files and make nothing of them."""
    source = open_database(folder, "lmdb")
    for first in range(0, len(source), BATCH):
        for index in range(first, first + BATCH):
            simplejpeg.decode_jpeg(source[index].image)
        yield None
    source.close()


class PillowDataset(Dataset[tuple[Tensor, int]]):
    """ImageNet's usual recipe, in torchvision's steps and without its overhead."""

    def __init__(self, folder: Path) -> None:
        self._source = open_database(folder, "lmdb")
        self._mean = torch.tensor(MEAN).view(3, 1, 1) / 255
        self._std = torch.tensor(STD).view(3, 1, 1) / 255

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
        return pixels.to(torch.float32).div_(255).sub_(self._mean).div_(self._std), record.label


def _rate(contender: Callable[[Path], Iterator[object]], folder: Path, timed: int) -> float:
    """Measure images a second, after the warm-up and before the last batches."""
    batches = contender(folder)
    for _ in range(WARM_UP):
        next(batches)
    start = time.perf_counter()
    for _ in range(timed):
        next(batches)
    seconds = time.perf_counter() - start
    for _ in batches:  # to the end, so that it leaves nothing running beside the next one
        pass
    return timed * BATCH / seconds


def _print(rates: dict[str, list[float]]) -> None:
    print(f"\n{'':28}{'images/s':>9}{'ms/image':>10}   Paceline's rate / its rate, 95 %")
    for name, values in rates.items():
        middle = median(values)
        ratio = "" if name == "Paceline" else str(paired_ratio(rates["Paceline"], values))
        print(f"{name:28}{middle:9.0f}{1000 / middle:10.3f}   {ratio}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 short rounds, to see that it runs")
    parser.add_argument("--rounds", type=int, default=11, help="default: %(default)s")
    return parser


if __name__ == "__main__":
    main()
