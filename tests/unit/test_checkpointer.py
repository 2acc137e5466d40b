"""The keeper: copies at once, writes in the background, saves what it can when told to."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import CheckpointError
from paceline.state.checkpoint_files import Checkpoints, read_checkpoint
from paceline.state.checkpointer import Checkpointer


class Part:
    """Something to keep."""

    def __init__(self) -> None:
        self.weight = torch.zeros(2)

    def state_dict(self) -> Mapping[str, Any]:
        return {"weight": self.weight}


class SlowDisk(Checkpoints):
    """A disk that writes when it may."""

    def __init__(self, run: Path) -> None:
        super().__init__(run, keep=5)
        self.begun, self.go = threading.Event(), threading.Event()

    def write(self, step: int, state: Mapping[str, Any], *, best: bool = False) -> Path:
        self.begun.set()
        assert self.go.wait(10)
        return super().write(step, state, best=best)


def make_checkpointer(part: Part, checkpoints: Checkpoints, **more: Any) -> Checkpointer:
    parts = {"model": part, "optimizer": part}
    return Checkpointer(parts, checkpoints, constant={"config": {"a": 1}}, **more)


def written(folder: Path, step: int) -> dict[str, Any]:
    return read_checkpoint(folder / "checkpoints" / f"step-{step:08}.pt")


def test_a_model_is_judged_by_what_it_has_learned(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), -torch.inf))
    checkpointer = Checkpointer(
        {"model": model, "optimizer": Part()}, Checkpoints(tmp_path, keep=5), constant={}
    )
    checkpointer.capture(1, {})
    checkpointer.publish()
    checkpointer.wait()
    assert written(tmp_path, 1)["model"]["mask"].isinf().all()
    nn.init.constant_(model.weight, torch.inf)
    checkpointer.capture(2, {})
    checkpointer.publish()
    checkpointer.wait()
    assert not (tmp_path / "checkpoints" / "step-00000002.pt").exists()


def test_what_was_captured_is_written_whatever_changes_afterwards(tmp_path: Path) -> None:
    part, disk = Part(), SlowDisk(tmp_path)
    checkpointer = make_checkpointer(part, disk)
    checkpointer.capture(1, {"number": 1})
    checkpointer.publish()
    assert disk.begun.wait(10)
    for step in (2, 3, 4):
        part.weight.fill_(float(step))
        checkpointer.capture(step, {"number": step})
    disk.go.set()
    checkpointer.wait()
    assert torch.equal(written(tmp_path, 1)["model"]["weight"], torch.zeros(2))
    assert written(tmp_path, 1)["position"] == {"number": 1}
    assert written(tmp_path, 1)["config"] == {"a": 1}
    assert checkpointer.published.get() == (1, tmp_path / "checkpoints" / "step-00000001.pt")


def test_a_snapshot_that_a_writer_has_yet_to_read_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, writers = Part(), list[threading.Thread]()
    checkpointer = make_checkpointer(part, Checkpoints(tmp_path, 5))
    checkpointer.capture(1, {})
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda thread: writers.append(thread))
        checkpointer.publish()
    for step in (2, 3):
        part.weight.fill_(float(step))
        checkpointer.capture(step, {})
    writers[0].run()
    assert torch.equal(written(tmp_path, 1)["model"]["weight"], torch.zeros(2))


def test_a_rescue_writes_the_newest_and_only_once(tmp_path: Path) -> None:
    part = Part()
    checkpointer = make_checkpointer(part, Checkpoints(tmp_path, 5))
    checkpointer.rescue()  # nothing yet
    for step in (1, 2):
        part.weight.fill_(float(step))
        checkpointer.capture(step, {})
    checkpointer.rescue()
    file = tmp_path / "checkpoints" / "step-00000002.pt"
    assert torch.equal(written(tmp_path, 2)["model"]["weight"], torch.full((2,), 2.0))
    file.unlink()
    checkpointer.rescue()
    assert not file.exists()


def test_a_broken_model_is_not_published(tmp_path: Path) -> None:
    part = Part()
    reports: list[str] = []
    checkpointer = make_checkpointer(part, Checkpoints(tmp_path, 5), report=reports.append)
    part.weight[0] = float("nan")
    for step in (4, 8):
        checkpointer.capture(step, {})
        checkpointer.publish()
        checkpointer.wait()
    assert not (tmp_path / "checkpoints").exists()
    assert reports == [
        "parameters are NaN or infinite before step 4: they are not saved. The checkpoints of "
        "earlier steps are valid."
    ]


def test_a_disk_that_refuses_is_told_at_the_next_occasion(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    checkpointer = make_checkpointer(Part(), Checkpoints(tmp_path, 5))
    checkpointer.capture(1, {})
    checkpointer.publish()
    with pytest.raises(CheckpointError, match="can't be written"):
        checkpointer.wait()
    checkpointer.wait()  # told once


def test_snapshots_take_under_a_hundredth_of_the_time(tmp_path: Path) -> None:
    now = iter([0.0, 10.0, 10.5, 60.0, 60.4, 60.6, 60.7, 110.7])
    checkpointer = make_checkpointer(Part(), Checkpoints(tmp_path, 5), clock=lambda: next(now))
    checkpointer.capture(1, {})  # from 10.0 to 10.5: the next is due 50 s later
    assert not checkpointer.snapshot_due()  # 60.0
    assert not checkpointer.snapshot_due()  # 60.4
    assert checkpointer.snapshot_due()  # 60.6, and it is on its way
    assert not checkpointer.snapshot_due()  # 60.7
    assert checkpointer.snapshot_due()  # 110.7


def test_what_a_snapshot_waited_for_counts_as_its_cost(tmp_path: Path) -> None:
    now = iter([0.0, 10.0, 10.5, 110.0, 160.6])
    checkpointer = make_checkpointer(Part(), Checkpoints(tmp_path, 5), clock=lambda: next(now))
    checkpointer.capture(1, {}, spent=1.0)  # 1.5 s
    assert not checkpointer.snapshot_due()  # 110.0
    assert checkpointer.snapshot_due()  # 160.6
