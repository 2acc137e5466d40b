"""Sections `input` and `decode` of `gpu.py`: `paceline train` from an LMDB of photographs.

All runs are up at once and take turns (`gpu_turns.py`). The peers are a loop in plain torch with
torch's DataLoader, as many worker processes and Pillow, and the same loop with synthetic images,
which is the ceiling. In `decode` the model computes nothing, and the peer is DataLoader alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from gpu_jobs import HERE, PACELINE, Jobs
from gpu_rows import Row, Setting, failure, not_measured
from gpu_turns import Contender, Turns
from photographs import jpeg, photograph, write_photographs
from rounds import paired_ratio

CEILING = "plain torch, synthetic images"
AUTO_RATIO = 0.97  # to the faster way; less is another choice
NVJPEG_BATCHES, NVJPEG_BATCH = 10, 256


@dataclass(frozen=True, kw_only=True)
class Size:
    """The work of a section.

    Attributes:
        model: a function of `gpu_models.py`.
        batch, pixels: images a step; height and width of an image.
        records, distinct: of the LMDB, whose epoch must outlast the turns; how many differ.
        workers: numbers of processes that decode.
        untimed, timed: seconds of a turn; the first are more where batches were made ahead.
        rest: seconds after a DataLoader's turn: its workers make two batches each ahead.
        rounds: at most.
    """

    model: str
    batch: int
    pixels: int
    records: int
    distinct: int = 64
    workers: Sequence[int]
    untimed: float
    timed: float
    rest: float = 0.0
    rounds: int = 5


TRAINING = Size(
    model="gated_resnet50",
    batch=256,
    pixels=224,
    records=40_960,
    workers=(8, 16),
    untimed=0.7,
    timed=1.2,
    rest=4.5,
)
DECODING = Size(
    model="gated_pooled",
    batch=64,
    pixels=224,
    records=8192,
    workers=(1, 4, 16),
    untimed=0.3,
    timed=0.8,
    rest=0.8,
)
SMALL = Size(
    model="gated_pooled",
    batch=8,
    pixels=224,
    records=512,
    distinct=4,
    workers=(1,),
    untimed=0.02,
    timed=0.05,
    rounds=2,
)


def input_(setting: Setting) -> Iterator[Row]:
    """Yield the rows of training."""
    size = SMALL if setting.small else TRAINING
    runs = _Runs(setting, size)
    contenders = {CEILING: runs.plain(), **runs.by_workers()}
    if not setting.small:
        contenders |= runs.by_device()
    with Jobs(setting) as jobs:
        turns = Turns(contenders, jobs, setting)
        rates = turns.measure(size.timed, size.rounds)
    yield from (failure(name, error) for name, error in turns.failures.items())
    for name in rates:
        yield _row(name, rates, CEILING, setting)
    for count in size.workers:
        ours, theirs = _names(count)
        if {ours, theirs} <= rates.keys():
            yield _row(ours, rates, theirs, setting)
    if setting.small:
        yield not_measured("decoding on the GPU", "it needs one")
    else:
        yield from _choices(rates, max(size.workers))


def decode(setting: Setting) -> Iterator[Row]:
    """Yield the rows of decoding alone."""
    size = SMALL if setting.small else DECODING
    with Jobs(setting) as jobs:
        turns = Turns(_Runs(setting, size).by_workers(), jobs, setting)
        rates = turns.measure(size.timed, size.rounds)
    yield from (failure(name, error) for name, error in turns.failures.items())
    for name in rates:
        yield _row(name, rates, dict(map(_names, size.workers)).get(name, ""), setting)
    if setting.small:
        yield not_measured("nvJPEG alone, one thread", "it needs a GPU")
        return
    yield _nvjpeg(setting.device)


class _Runs:
    """The runs of one section, from its own database.

    Args:
        setting: the section's.
        size: its work.
    """

    def __init__(self, setting: Setting, size: Size) -> None:
        self._setting, self._size = setting, size
        self._count = 0
        self._database = setting.folder / "photographs"
        write_photographs(self._database, size.records, size.distinct)

    def plain(self, workers: int = 0) -> Contender:
        """Return a loop in plain torch: by a DataLoader, or with synthetic images.

        DataLoader makes two batches a worker ahead, which last long where it is almost fast enough.
        """
        size = self._size
        data = ["--data", str(self._database), "--workers", str(workers)] if workers else []
        command = [
            *(sys.executable, str(HERE / "gpu_plain.py"), "--model", size.model, *data),
            *("--device", self._setting.device.type, "--batch_size", str(size.batch)),
            *("--image_size", str(size.pixels)),
        ]
        untimed = size.untimed * (3.5 if workers else 1)
        rest = size.rest if workers else 0.0
        return Contender(command=command, batch=size.batch, untimed=untimed, rest=rest)

    def train(self, *flags: str, cores: int = 0, trials: float = 0.0) -> Contender:
        """Return a run of `paceline train` with more flags."""
        self._count += 1
        size, setting = self._size, self._setting
        device = ["--use_cpu"] if setting.small else ["--gpus", "0", "--dtype", "bfloat16"]
        command = [
            *(*PACELINE, "train", "--train_data", str(self._database), *device, *flags),
            *("--model", f"gpu_models:{size.model}", "--batch_size", str(size.batch)),
            *("--image_size", str(size.pixels), "--base_learning_rate", "0.001"),
            *("--image_mean_per_channel", "123.675", "116.28", "103.53"),
            *("--image_std_per_channel", "58.395", "57.12", "57.375"),
            *("--num_epochs", "1000", "--checkpoint_minutes", "0"),
            *("--output_dir", str(setting.folder / "runs"), "--run_id", f"r{self._count}"),
        ]
        return Contender(
            command=command,
            batch=size.batch,
            untimed=size.untimed * 1.5,
            rest=size.rest / 3 if cores else 0.0,  # one process makes two batches ahead
            cores=cores,
            trials=trials,
        )

    def by_workers(self) -> dict[str, Contender]:
        """Return Paceline and DataLoader with each number of processes."""
        contenders = {}
        for count in self._size.workers:
            ours, theirs = _names(count)
            contenders[ours] = self.train("--decode_workers", str(count))
            contenders[theirs] = self.plain(count)
        return contenders

    def by_device(self) -> dict[str, Contender]:
        """Return Paceline with --decode_device, on all cores and on two."""
        flag = "--decode_device"
        return {
            _on("cuda", "all"): self.train(flag, "cuda"),
            _on("auto", "all"): self.train(flag, "auto", trials=6.0),
            _on("cpu", "two"): self.train(flag, "cpu", cores=2),
            _on("cuda", "two"): self.train(flag, "cuda", cores=2),
            _on("auto", "two"): self.train(flag, "auto", cores=2, trials=15.0),
        }


def _row(name: str, rates: Mapping[str, Sequence[float]], peer: str, setting: Setting) -> Row:
    """Return a contender's row, with its ratio to a peer that has run."""
    rate = median(rates[name])
    ratio = paired_ratio(rates[name], rates[peer]) if peer in rates and peer != name else None
    target, met = "", None
    if peer == CEILING and not setting.small:
        if name == _names(8)[0]:
            target, met = ">= 3,000 images/s", rate >= 3000
        for one, least in ((_names(16)[0], 0.98), (_on("cuda", "two"), 0.90)):
            if name == one and ratio is not None:
                target, met = f">= {least:.2f} of synthetic images", ratio.median >= least
    return Row(
        name=name,
        value=rate,
        measured=f"{rate:.0f} images/s",
        target=target,
        met=met,
        peer=peer if ratio is not None else "",
        ratio=ratio,
    )


def _choices(rates: Mapping[str, Sequence[float]], workers: int) -> Iterator[Row]:
    """Yield whether auto was as fast as the faster way, on all cores and on two."""
    for cores, cpu in (("all", _names(workers)[0]), ("two", _on("cpu", "two"))):
        ways = [name for name in (cpu, _on("cuda", cores)) if name in rates]
        auto = _on("auto", cores)
        if auto in rates and len(ways) == 2:
            faster = max(ways, key=lambda name: median(rates[name]))
            ratio = paired_ratio(rates[auto], rates[faster])
            yield Row(
                name=f"--decode_device auto on {cores} cores chose the faster way",
                value=ratio.median,
                measured=f"{median(rates[auto]):.0f} images/s",
                target=f"as fast as {faster}",
                met=ratio.median >= AUTO_RATIO,
                peer=faster,
                ratio=ratio,
            )


def _nvjpeg(device: torch.device) -> Row:
    """Measure torchvision's decoder on the GPU alone, a batch a call."""
    name = "nvJPEG alone, one thread"
    try:
        from torchvision.io import decode_jpeg
    except (ImportError, RuntimeError) as error:  # the latter where it doesn't fit torch's build
        return not_measured(name, f"torchvision can't be imported: {error}".splitlines()[0])
    files = [jpeg(photograph(np.random.default_rng(seed))) for seed in range(16)]
    tensors = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
    batch = [tensors[index % len(tensors)] for index in range(NVJPEG_BATCH)]
    decode_jpeg(batch, device=device)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(NVJPEG_BATCHES):
        decode_jpeg(batch, device=device)
    torch.cuda.synchronize()
    rate = NVJPEG_BATCHES * NVJPEG_BATCH / (time.perf_counter() - began)
    return Row(name=name, value=rate, measured=f"{rate:.0f} images/s")


def _names(workers: int) -> tuple[str, str]:
    """Return the names of Paceline's run and DataLoader's."""
    return f"paceline train, {workers} decode processes", f"DataLoader, {workers} workers"


def _on(where: str, cores: str) -> str:
    return f"paceline train, --decode_device {where}, {cores} cores"
