"""Images a second of `paceline predict`: beside its parts alone, and beside a plain script.

    python benchmarks/predict.py FOLDER [--images 10000] [--rounds 5] [--model resnet20]

Interleaved, on JPEG files of a folder, on the CPU:

    decode     Paceline's decode processes alone: batches are made and dropped
    model      the model alone, with a batch that is there
    predict    both, as `paceline predict` runs them
    command    `paceline predict --csv`, the whole program
    script     `predict_plain.py`, the whole program: Pillow and torch's DataLoader

Where decoding and model share the cores, no program predicts more than 1 / (1/decode + 1/model)
images a second: `predict` is printed as a share of that, without the start of Python and torch. The
two programs have the same files, weights, batch size and environment, as many processes that
decode, and rows of the same form to write; their starts count. Their processor time, of all their
processes, is the better comparison on a machine that others use. Memory is this process's in
`predict`, after a quarter of the images and at the end.
"""

from __future__ import annotations

import os

from command_line import Options, run_script

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as all commands do, before torch is loaded

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from rounds import interleaved, median_of, paired_ratio

from paceline.cluster.supervision.allocator import keep_freed_memory
from paceline.config.data import DataConfig
from paceline.config.model import ModelConfig
from paceline.config.train import TrainConfig
from paceline.data.image.image_paths import ImageFiles, find_images
from paceline.data.order import Indices
from paceline.inference.decode_count import decode_processes
from paceline.inference.predictions import image_batches, predict
from paceline.inference.trained_model import TrainedModel
from paceline.models.zoo import build_model
from paceline.state.weights import save_weights
from paceline.state.weights_about import describe

BATCH = 64  # of `paceline predict`
PACELINE = ("-m", "paceline.cli.main")
PLAIN = Path(__file__).with_name("predict_plain.py")
CPU = torch.device("cpu")


def main() -> None:
    arguments = _parser().parse_args()
    keep_freed_memory()  # as the command does
    paths = find_images([arguments.folder])[: arguments.images]
    processes = decode_processes(len(paths), None)
    print(f"{len(paths):,} images, {arguments.model}; decode processes: {processes}, and a thread")
    memory: list[tuple[int, int]] = []
    used: dict[str, list[float]] = {"command": [], "script": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.pt"
        trained = trained_model(file, arguments.model, arguments.image_size)
        command = [*PACELINE, "predict", str(file), "-", "--csv", "--use_cpu"]
        script = [str(PLAIN), str(file), arguments.model, str(arguments.image_size)]
        script += [str(processes + 1)]
        found = interleaved(
            {
                "decode": lambda: decoding(trained, paths, processes),
                "model": lambda: model_alone(trained, len(paths)),
                "predict": lambda: predicting(trained, paths, memory),
                "command": lambda: program(command, paths, used["command"]),
                "script": lambda: program(script, paths, used["script"]),
            },
            arguments.rounds,
        )
    for name, values in found.items():
        print(f"{name:<10}{median_of(values):,.0f} images/s")
    bound = [1 / (1 / d + 1 / m) for d, m in zip(found["decode"], found["model"], strict=True)]
    print(f"predict / bound    {paired_ratio(found['predict'], bound)}")
    print(f"command / script   {paired_ratio(found['command'], found['script'])}")
    for name, values in used.items():
        print(f"processor, {name:<8}{median_of(values)} s")
    print(
        f"command / script   {paired_ratio(used['command'], used['script'])} of its processor time"
    )
    quarter, end = memory[0]
    print(f"memory: {quarter / 2**20:.0f} MiB after a quarter, {end / 2**20:.0f} MiB at the end")


def trained_model(file: Path, name: str, size: int) -> TrainedModel:
    """Write a model's new weights to a file, and return it as `paceline predict` reads it."""
    data = DataConfig(train_data="x", num_labels=10, image_size=size, augment="none")
    config = TrainConfig(data=data, model=ModelConfig(model=name))
    model = build_model(name, num_labels=10, num_channels=3)
    save_weights(file, model, describe(config, None))
    return TrainedModel.read(None, CPU, str(file))


def decoding(trained: TrainedModel, paths: list[str], processes: int) -> float:
    """Measure decoding alone."""
    begun = time.perf_counter()
    source = ImageFiles(paths)
    with closing(image_batches(trained, source, _ranges(len(paths)), processes)) as batches:
        for _ in batches:
            pass
    return len(paths) / (time.perf_counter() - begun)


def _ranges(count: int) -> Iterator[Indices]:
    return (np.arange(at, min(at + BATCH, count)) for at in range(0, count, BATCH))


@torch.no_grad()
def model_alone(trained: TrainedModel, count: int) -> float:
    """Measure the model alone."""
    size = trained.config.data.image_size
    images = torch.randn(BATCH, 3, size, size).to(memory_format=torch.channels_last)
    begun = time.perf_counter()
    for _ in range(count // BATCH):
        trained.predictor.logits(images).softmax(1).topk(3)
    return count // BATCH * BATCH / (time.perf_counter() - begun)


def predicting(trained: TrainedModel, paths: list[str], memory: list[tuple[int, int]]) -> float:
    """Measure `paceline predict`'s loop, and add this process's memory to `memory`."""
    begun = time.perf_counter()
    quarter = 0
    with closing(predict(trained, paths, top=3, batch_size=BATCH, workers=None)) as predictions:
        for number, _ in enumerate(predictions):
            if number == len(paths) // 4:
                quarter = _resident()
    memory.append((quarter, _resident()))
    return len(paths) / (time.perf_counter() - begun)


def _resident() -> int:
    """Return this process's resident memory, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def program(words: list[str], paths: list[str], used: list[float]) -> float:
    """Measure a program that reads paths, and add the processor seconds of its processes to `used`.

    Those of a process count once its parent has waited for it.
    """
    before = os.times()
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words],
        input="\n".join(paths),
        text=True,
        capture_output=True,
        check=False,
    )
    seconds = time.perf_counter() - begun
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert [row.partition(",")[0] for row in done.stdout.splitlines()][-len(paths) :] == paths
    used.append(
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return len(paths) / seconds


def _parser() -> Options:
    parser = Options(__doc__)
    parser.add("folder")
    parser.add("--images", type=int, default=10_000)
    parser.add("--rounds", type=int, default=5)
    parser.add("--model", default="resnet20")
    parser.add("--image_size", type=int, default=32)
    return parser


if __name__ == "__main__":
    run_script(main)
