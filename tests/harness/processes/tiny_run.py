"""The smallest run that trains: a database of 15 images and the flags that go with it."""

from __future__ import annotations

from pathlib import Path

from tests.harness.data.image_folder import some_images
from tests.harness.processes.command import run
from tests.harness.processes.run_folders import events

SMALL = (
    *("--model", "resnet20", "--image_size", "32", "--augment", "pad", "--num_labels", "3"),
    *("--batch_size", "4", "--num_epochs", "2"),
)


def make_database(folder: Path, name: str = "train", each: int = 5) -> str:
    """Make the database of 3 classes of so many images; return its path."""
    some_images(folder / name, classes=3, each=each, size=32)
    made = run("db", "create", name, f"{name}-lmdb", folder=folder)
    assert made.status == 0, made.text
    return str(folder / f"{name}-lmdb")


def train(database: str, *words: str) -> list[str]:
    """Return the words of a command that trains."""
    return ["-m", "paceline.cli.main", "train", "--train_data", database, *SMALL, *words]


def steps_of(run_folder: Path, rank: int) -> list[tuple[int, int, int]]:
    """Read which samples a rank trained in which step."""
    steps = [event for event in events(run_folder, rank) if event["event"] == "step"]
    return [(event["step"], event["first"], event["last"]) for event in steps]
