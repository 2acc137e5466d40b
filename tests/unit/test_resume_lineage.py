"""Starts of a run descend from each other: in its events, its checkpoints and its folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline import CheckpointError
from paceline.cli.ledger import main as ledger
from paceline.cluster.membership.lineage import of_values
from paceline.state.checkpoint_files import read_checkpoint
from paceline.state.run_folder import recorded_lineage
from tests.harness.library.small_training import BATCH, loss_of, network, samples, sgd
from tests.harness.processes.run_folders import events


def train(run: Path, until: int) -> None:
    """Train until a number of steps is done, with a checkpoint before each step."""
    with paceline.join(run, checkpoint_steps=1, keep_checkpoints=99) as world:
        model = network()
        optimizer = sgd(model)
        paceline.parallelize(model, optimizer, world)
        loader = paceline.loader(samples(), BATCH, world)
        while world.steps < until:
            for x, y in loader:
                with world.step():
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if world.steps == until:
                    break
        world.settle()


def starts(run: Path) -> list[dict[str, Any]]:
    """Return the events `run` of all starts, in order."""
    found = [event for event in events(run) if event["event"] == "run"]
    return sorted(found, key=lambda event: event["generation"])


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08}.pt"


def newest(run: Path) -> int:
    return max(int(path.stem[5:]) for path in (run / "checkpoints").glob("step-*.pt"))


def test_a_start_descends_from_the_generation_of_its_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, 4)
    step = newest(run)
    train(run, 8)
    first, second = starts(run)
    assert (first["start"], first["ancestors"]) == (0, [])
    assert (second["start"], second["ancestors"]) == (step, [[first["id"], 0]])
    lineage = [*second["ancestors"], [second["id"], step]]
    assert read_checkpoint(checkpoint(run, newest(run)))["lineage"] == lineage
    assert recorded_lineage(run) == (1, of_values(lineage))
    assert ledger([str(run)]) == 0


def test_a_start_makes_void_what_a_damaged_checkpoint_had(tmp_path: Path) -> None:
    """The third start descends from the second one, of which no checkpoint can be read."""
    run = tmp_path / "run"
    train(run, 3)
    step = newest(run)
    train(run, 7)
    newer = [path for path in (run / "checkpoints").glob("step-*.pt") if int(path.stem[5:]) > step]
    assert newer
    for path in newer:
        path.write_bytes(b"damaged")
    train(run, step + 1)
    second, third = starts(run)[1:]
    assert (third["start"], third["ancestors"][-1]) == (step, [second["id"], step])
    assert ledger([str(run)]) == 0


def test_a_void_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    run, aside = tmp_path / "run", tmp_path / "aside"
    train(run, 7)
    last = newest(run)
    aside.mkdir()
    for path in (run / "checkpoints").glob("*.pt"):
        if path != checkpoint(run, 3):
            shutil.move(path, aside / path.name)
    train(run, 5)
    assert [start["start"] for start in starts(run)] == [0, 3]
    shutil.copy(aside / f"step-{last:08}.pt", checkpoint(run, last))
    resumed = max(
        int(p.stem[5:])
        for p in (run / "checkpoints").glob("step-*.pt")
        if p.stem[5:] != f"{last:08}"
    )
    train(run, 6)
    assert starts(run)[-1]["start"] == resumed
    assert ledger([str(run)]) == 0


def test_two_lineages_that_both_committed_steps_are_refused(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    train(run, 3)
    shutil.copytree(run, copy)
    for each, until in ((run, 6), (copy, 7)):
        train(each, until)
    shutil.copy(checkpoint(copy, newest(copy)), checkpoint(run, newest(copy)))
    with pytest.raises(CheckpointError, match="two lineages of the run, which both committed"):
        train(run, 8)


def test_a_run_of_an_earlier_version_is_an_ancestor(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, 3)
    for path in (run / "checkpoints").glob("*.pt"):
        state = torch.load(path, weights_only=True)
        del state["lineage"]
        torch.save(state, path)
    (run / "lineage.json").unlink()
    (file,) = run.glob("events.*.jsonl")
    file.write_text(file.read_text().replace('"id": ', '"unknown": '))
    step = newest(run)
    train(run, 6)
    assert starts(run)[-1]["ancestors"] == []
    assert starts(run)[-1]["start"] == step
    assert ledger([str(run)]) == 0
