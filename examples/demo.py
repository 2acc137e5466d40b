"""Train a small ResNet on real images with two workers, from class folders to held-out accuracy.

`make demo` runs it. Scikit-learn's handwritten digits (1,797 grey images) become JPEG files in
`demo-data/`, `paceline db create` makes databases of them, and `paceline train` does the rest.
Takes less than half a minute on two cores.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

FOLDER = Path("demo-data")  # made anew each time
RUNS = Path("runs")
PIXELS = 16
HELD_OUT = 360
EXPECTED_ACCURACY = 0.95


def main() -> int:
    """Make the data, train, and tell how well; return the exit status."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    write_images()
    for part in ("train", "test"):
        status = paceline("db", "create", FOLDER / part, FOLDER / f"{part}-lmdb")
        if status:
            return status
    run_id = f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    return train(run_id) or report(RUNS / run_id)


def write_images() -> None:
    """Write the digits as demo-data/{train,test}/DIGIT/NUMBER.jpg, PIXELS high and wide."""
    digits = load_digits()  # images: (1797, 8, 8), values 0 to 16
    numbers = range(len(digits.target))
    train, test = train_test_split(
        numbers, test_size=HELD_OUT, random_state=0, stratify=digits.target
    )
    for part, chosen in (("train", train), ("test", test)):
        for number in chosen:
            folder = FOLDER / part / str(digits.target[number])
            folder.mkdir(parents=True, exist_ok=True)
            pixels = (digits.images[number] * (255 / 16)).astype(np.uint8)
            image = Image.fromarray(pixels).resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)
            image.save(folder / f"{number:04}.jpg", quality=95)


def train(run_id: str) -> int:
    """Train and return the command's status."""
    flags = {
        "train_data": FOLDER / "train-lmdb",
        "test_data": FOLDER / "test-lmdb",
        "num_channels": 1,
        "image_size": PIXELS,
        "num_labels": 10,
        "augment": "none",
        "model": "resnet20",
        "num_workers": 2,
        "batch_size": 64,
        "num_epochs": 5,
        "lr_policy": "cosine",
        "output_dir": RUNS,
        "run_id": run_id,
    }
    return paceline(
        "train", *(word for name, value in flags.items() for word in (f"--{name}", value))
    )


def paceline(*words: object) -> int:
    """Show a command and run it; return its status."""
    arguments = [str(word) for word in words]
    print("$ paceline", *arguments, flush=True)
    command = subprocess.Popen([sys.executable, "-m", "paceline.cli.main", *arguments])
    try:
        return command.wait()
    except KeyboardInterrupt:
        return command.wait()  # it got the Ctrl-C as well, and ends by itself


def report(run: Path) -> int:
    """Read the last row of a run's log, say what it says, and judge it."""
    (log,) = run.glob("*.log")
    with log.open() as file:
        next(file)  # the parameters
        accuracy = float(list(csv.DictReader(file))[-1]["test_accuracy"])
    print(f"\nAccuracy on {HELD_OUT} held-out images: {accuracy:.1%}\nLog: {log}")
    if accuracy < EXPECTED_ACCURACY:
        print(f"That is less than the {EXPECTED_ACCURACY:.0%} that were expected.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
