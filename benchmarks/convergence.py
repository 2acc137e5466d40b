"""Where training ends with each wire: ResNet-20 on CIFAR-10, two machines, the same seeds.

    python benchmarks/convergence.py TRAIN_DB TEST_DB --runs FOLDER [--epochs 8] [--seeds 1 2 3]

The two machines are this one twice, so that gradients travel over its loopback interface, coded as
they are between machines. What FOLDER has already isn't run again: the same command resumes it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from accuracies import last_accuracy, print_ends
from command_line import Options, run_script

from paceline.codecs.codecs import CODECS

MACHINES = 2
MODEL = [
    *("--model", "resnet20", "--image_size", "32", "--augment", "pad", "--num_labels", "10"),
    *("--lr_policy", "cosine", "--warmup_epochs", "1", "--timeout", "3600"),
    *("--image_mean_per_channel", "125.3", "123.0", "113.9"),
    *("--image_std_per_channel", "63.0", "62.1", "66.7"),
]


def main() -> None:
    options = _parser().parse_args()
    ends: dict[str, list[float]] = {wire: [] for wire in options.wires}
    for seed in options.seeds:
        for wire in options.wires:
            accuracy = end_of(f"{wire}-{seed}", wire, seed, options)
            ends[wire].append(accuracy)
            print(f"seed {seed}, {wire}: {accuracy:.2%} of the test images", flush=True)
    print()
    print_ends("wire", ends, options.seeds, width=8, markdown=options.markdown)


def end_of(run_id: str, wire: str, seed: int, options: argparse.Namespace) -> float:
    """Train, or look at what was trained; return the last test accuracy."""
    folder = options.runs / run_id
    if not (folder / "finished").exists():
        machines = [_start(number, run_id, wire, seed, options) for number in range(MACHINES)]
        try:
            statuses = [machine.wait() for machine in machines]
            if any(statuses):
                raise SystemExit(f"{run_id} failed: what it said is in {options.runs}.")
        finally:
            for machine in machines:
                machine.terminate()
    return last_accuracy(folder)


def _start(
    number: int, run_id: str, wire: str, seed: int, options: argparse.Namespace
) -> subprocess.Popen[bytes]:
    meet = options.runs / "meet"
    meet.mkdir(parents=True, exist_ok=True)
    words = {
        "--train_data": options.train,
        "--test_data": options.test,
        "--wire": wire,
        "--seed": seed,
        "--num_epochs": options.epochs,
        "--epoch_size": options.epoch_size,
        "--batch_size": options.batch,
        "--num_shards": MACHINES,
        "--shard_id": number,
        "--run_id": run_id,
        "--output_dir": options.runs,
        "--file_store_path": meet,
    }
    given = [str(word) for pair in words.items() for word in pair]
    train = [sys.executable, "-m", "paceline.cli.main", "train", "--sync", "notified"]
    with (options.runs / f"{run_id}.{number}.txt").open("wb") as file:
        return subprocess.Popen([*train, *MODEL, *given], stdout=file, stderr=file)


def _parser() -> Options:
    parser = Options(__doc__, markdown=True)
    parser.add("train", type=Path, help="database of the training images")
    parser.add("test", type=Path, help="database of the test images")
    parser.add("--runs", type=Path, required=True, help="folder for the runs")
    parser.add("--epochs", type=int, default=8)
    parser.add("--epoch-size", type=int, default=50_000)
    parser.add("--batch", type=int, default=64, help="images a machine")
    parser.add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add("--wires", nargs="+", choices=sorted(CODECS), default=["fp32", "bf16", "int8"])
    return parser


if __name__ == "__main__":
    run_script(main)
