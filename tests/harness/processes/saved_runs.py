"""Saved runs of an earlier Paceline, which today's resumes: unpacking and comparison.

    tests/fixtures/saved_runs/
        perceptron.py         the model, whose bits are the same on every processor
        <name>/run.tar.gz     the folder of a run that was stopped
        <name>/command.json   its command and its number of workers
        <name>/facts.json     what the Paceline that saved the run reached when it resumed it

The tests use the command line, the library's public names and the files of a run alone, which stay
what they are. `tests/fixtures/make_saved_runs.py` makes the runs.
"""

from __future__ import annotations

import csv
import json
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import paceline
from tests.fixtures.saved_runs import perceptron
from tests.harness.data.databases import write_minidb
from tests.harness.data.record_bytes import raw_datum

FOLDER = Path(perceptron.__file__).parent
RUN, COMMAND, FACTS = "run.tar.gz", "command.json", "facts.json"
LABELS = 4
_TIMES = ("time_spent", "cumulative_time_spent", "inputs_per_sec")


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A run that was stopped.

    Attributes:
        name: its folder's.
        run: the run's folder, relative to the folder of its command.
        arguments: of its `paceline` command; none of a script's run.
        machines: the number of workers of each machine.
        facts: what the Paceline that saved the run reached when it resumed it, as from `facts`.
    """

    name: str
    run: str
    arguments: Sequence[str]
    machines: Sequence[int]
    facts: Mapping[str, Any]


def saved_run(name: str) -> SavedRun:
    """Read the description of a saved run."""
    command, found = ((FOLDER / name / file).read_text() for file in (COMMAND, FACTS))
    return SavedRun(name=name, **json.loads(command), facts=json.loads(found))


def unpack(saved: SavedRun, folder: Path) -> Path:
    """Unpack a run into the folder of its command, beside its data; return the run's folder."""
    prepare(folder)
    run = folder / saved.run
    run.parent.mkdir(exist_ok=True)
    with tarfile.open(FOLDER / saved.name / RUN) as archive:
        archive.extractall(run.parent, filter="data")
    assert run.is_dir()
    return run


def prepare(folder: Path) -> None:
    """Write the model and the data of all saved runs."""
    shutil.copy(perceptron.__file__, folder)
    write_minidb(folder / "train-minidb", [_record(i) for i in range(22)])


def differences(run: Path, saved: SavedRun) -> list[str]:
    """Name the facts in which a resumed run differs from what its earlier Paceline reached.

    Facts that were not recorded, such as a new field of a checkpoint, are no differences.
    """
    found = facts(run)
    return [name for name, fact in saved.facts.items() if _known(found[name], fact) != fact]


def facts(run: Path) -> dict[str, Any]:
    """Return the results of a run's newest start as JSON, floats in hexadecimal."""
    newest = max((run / "checkpoints").glob("step-*.pt"))
    state = torch.load(newest, weights_only=True)
    start = int((run / "generation").read_text())
    optimizer = state["optimizer"]
    exact = {
        "checkpoint": newest.name,
        "model": state["model"],
        "momentum": {name: slots["momentum_buffer"] for name, slots in optimizer["state"].items()},
        "rates": [group["lr"] for group in optimizer["param_groups"]],
        "schedule": _schedule(state.get("schedule", {})),
        "position": state["position"],
        "exchange": state.get("exchange"),
        "course": state.get("course"),
        "tracked": {name: _schedule(kept) for name, kept in state.get("tracked", {}).items()},
        "weights": {path.name: torch.load(path, weights_only=True) for path in run.glob("*.pt")},
        "ranks": _ranks(run, start),
        "rows": [row for path in run.glob("*.log") for row in _rows(path)],
    }
    plain: dict[str, Any] = _plain(exact)
    return plain


def train_by_library(run: Path, *, steps: int | None = None, resume: str | Path = "auto") -> int:
    """Train in this process as a script does; return the number of the first step.

    The optimizer's constants are powers of two: their products are exact, so that a fused
    multiply-add changes no bit.

    Args:
        run: the run's folder.
        steps: stop before this step; None: train to the end.
        resume: see `paceline.join`.
    """
    with paceline.join(run, resume=resume, seed=7, device="cpu", keep_checkpoints=1) as world:
        torch.manual_seed(3)
        model = perceptron.double(LABELS)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=2**-3, momentum=0.5, nesterov=True, weight_decay=2**-10
        )
        model, optimizer = paceline.parallelize(model, optimizer, world)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
        seen = Seen()
        world.track(schedule, seen=seen)
        loader = paceline.loader(_samples(), 6, world)
        first = world.steps
        for _ in range(loader.epoch, 3):
            for images, labels in loader:
                if world.steps == steps:
                    return first
                with world.step():
                    torch.nn.functional.cross_entropy(model(images), labels).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                schedule.step()
                seen.labels += labels.tolist()
    return first


class Seen:
    """State of the script's own: the labels of all trained samples, in their order."""

    def __init__(self) -> None:
        self.labels: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"labels": list(self.labels)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.labels = list(state["labels"])


def _samples() -> TensorDataset:
    """Make 22 samples; the last batch of 6 has 4."""
    values = np.stack([_pixels(i) for i in range(22)]).astype(np.float64) / 128 - 1
    return TensorDataset(torch.from_numpy(values), torch.arange(22) % LABELS)


def _record(i: int) -> tuple[bytes, bytes]:
    return b"%04d" % i, raw_datum(_pixels(i), i % LABELS)


def _pixels(i: int) -> np.ndarray:
    """Make the planes of an image, (channels, height, width)."""
    return (np.arange(12) * 37 + i * 101 + i * i * 11).astype(np.uint8).reshape(3, 2, 2)


def _ranks(run: Path, start: int) -> list[dict[str, Any]]:
    """Return the ranks' events of one start, without times."""
    ranks = {}
    for path in run.glob("events.*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for at, event in enumerate(lines):
            if event["event"] == "run" and event["generation"] == start:
                ranks[event["rank"]] = _events(lines[at:])
    return [ranks[rank] for rank in sorted(ranks)]


def _events(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def fields(kind: str, *names: str) -> list[list[Any]]:
        return [[e[name] for name in names] for e in found if e["event"] == kind]

    return {
        "restore": fields("restore", "generation", "step"),
        "steps": fields("step", "generation", "step", "epoch", "first", "last", "skipped"),
        "losses": fields("loss", "step", "loss"),
        "epochs": fields(
            "epoch", "epoch", "samples", "batches", "loss", "accuracy", "test_accuracy"
        ),
        "checkpoints": fields("checkpoint", "path")[-1:],
        "end": fields("end", "generation"),
    }


def _schedule(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheduler's position; its other fields differ between versions of torch."""
    known = ("last_epoch", "_last_lr")
    return {name: state[name] for name in (known if "last_epoch" in state else state)}


def _rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV log, without times."""
    rows = csv.DictReader(path.read_text().splitlines()[1:])
    return [{name: value for name, value in row.items() if name not in _TIMES} for row in rows]


def _known(found: Any, recorded: Any) -> Any:
    """Return the part of a fact that was recorded."""
    if isinstance(found, dict) and isinstance(recorded, dict):
        return {key: _known(found.get(key), each) for key, each in recorded.items()}
    if isinstance(found, list) and isinstance(recorded, list) and len(found) == len(recorded):
        return [_known(*pair) for pair in zip(found, recorded, strict=True)]
    return found


def _plain(value: Any) -> Any:
    """Make JSON of a checkpoint's values."""
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape), _plain(value.flatten().tolist())]
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.hex() if isinstance(value, float) else value
