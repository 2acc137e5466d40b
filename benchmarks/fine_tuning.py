"""What trained weights are worth with few images: ResNet-20, halves of CIFAR-10's classes.

    python benchmarks/fine_tuning.py cifar10/train cifar10/test --runs FOLDER [--seeds 1 2 3]

A model is trained on the images of the first five classes. Then 100 images a class of the other
five are trained for the same 10 epochs: from scratch, from the trained weights, and from these with
all but the last stage frozen. Each is evaluated once, after its last epoch. What FOLDER has already
isn't run again: the same command resumes it. Two quiet cores need less than 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from accuracies import print_ends
from command_line import Options, run_script

CLASSES = 5  # of ten, for the first training
MODEL = [
    *("--model", "resnet20", "--image_size", "32", "--augment", "pad", "--num_labels", "5"),
    *("--lr_policy", "cosine", "--warmup_epochs", "1", "--label_smoothing", "0.1"),
    *("--image_mean_per_channel", "125.3", "123.0", "113.9"),
    *("--image_std_per_channel", "63.0", "62.1", "66.7"),
    *("--num_workers", "1", "--use_cpu"),
]
FROZEN = ("conv1.*", "bn1.*", "layer1.*", "layer2.*")


def main() -> None:
    options = _parser().parse_args()
    started = time.monotonic()
    names = sorted(path.name for path in options.train.iterdir() if path.is_dir())
    halves = {"first": names[:CLASSES], "other": names[CLASSES:]}
    for half, classes in halves.items():
        few = options.images if half == "other" else 0
        _database(options.train, classes, options.runs / f"{half}-train", few)
        _database(options.test, classes, options.runs / f"{half}-test", 0)
    flags = {"--num_epochs": options.first_epochs, "--batch_size": 128, "--seed": 0}
    accuracy = _train("first", "first", flags, options)
    print(f"the first {CLASSES} classes: {accuracy:.2%} of the test images", flush=True)
    weights = ["--weights", str(options.runs / "first" / "resnet20_model.pt")]
    ways = {
        "from scratch": [],
        "from the weights": weights,
        "from the weights, frozen but layer3": [*weights, "--freeze", *FROZEN],
    }
    ends: dict[str, list[float]] = {way: [] for way in ways}
    for seed in options.seeds:
        for number, (way, more) in enumerate(ways.items()):
            flags = {"--num_epochs": options.epochs, "--batch_size": 32, "--seed": seed}
            ends[way].append(_train(f"other-{number}-{seed}", "other", flags, options, more))
            print(f"seed {seed}, {way}: {ends[way][-1]:.2%} of the test images", flush=True)
    print()
    title = f"{options.epochs} epochs"
    print_ends(title, ends, options.seeds, width=36, markdown=options.markdown)
    print(f"\n{time.monotonic() - started:.0f} seconds in all")


def _database(images: Path, classes: list[str], where: Path, few: int) -> None:
    """Make a database of some classes: of the first `few` images of each, or of all (0)."""
    if where.exists():
        return
    folder = where.with_suffix(".images")
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for path in sorted((images / name).iterdir())[: few or None]:
            link = folder / name / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())
    _run(["db", "create", str(folder), str(where)], where.with_suffix(".txt"))


def _train(
    run_id: str,
    half: str,
    flags: Mapping[str, object],
    options: argparse.Namespace,
    more: list[str] | None = None,
) -> float:
    """Train what isn't trained yet, and evaluate it; return the accuracy on the test images."""
    words = {
        "--train_data": options.runs / f"{half}-train",
        "--output_dir": options.runs,
        "--run_id": run_id,
        "--base_learning_rate": options.rate,
        **flags,
    }
    folder = options.runs / run_id
    if not (folder / "finished").exists():
        given = [str(word) for pair in words.items() for word in pair]
        _run(["train", *MODEL, *given, *(more or ())], options.runs / f"{run_id}.txt")
    scores = options.runs / f"{run_id}.json"
    test = str(options.runs / f"{half}-test")
    _run(["evaluate", str(folder), "--test_data", test, "--use_cpu", "--json"], scores)
    return float(json.loads(scores.read_text().splitlines()[-1])["accuracy"])


def _run(words: list[str], output: Path) -> None:
    with output.open("wb") as file:
        command = [sys.executable, "-m", "paceline.cli.main", *words]
        if subprocess.run(command, stdout=file, stderr=file, check=False).returncode:
            raise SystemExit(f"paceline {' '.join(words)} failed: what it said is in {output}.")


def _parser() -> Options:
    parser = Options(__doc__, markdown=True)
    parser.add("train", type=Path, help="training images, CLASS/IMAGE")
    parser.add("test", type=Path, help="test images, CLASS/IMAGE")
    parser.add("--runs", type=Path, required=True, help="folder for the runs")
    parser.add("--first-epochs", type=int, default=5)
    parser.add("--epochs", type=int, default=10)
    parser.add("--images", type=int, default=100, help="a class, of the other half")
    parser.add("--rate", type=float, default=0.1)
    parser.add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    return parser


if __name__ == "__main__":
    run_script(main)
