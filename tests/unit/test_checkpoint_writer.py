"""The checkpoint writer: writes in the background, and at a failure what is newest in memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.errors import CheckpointError
from paceline.state.checkpoint_files import Checkpoints, read_checkpoint
from paceline.state.checkpoint_writer import Checkpoint, CheckpointWriter
from tests.harness.membership.given_membership import GivenMembership


class SlowDisk(Checkpoints):
    """A disk that writes when it may."""

    def __init__(self, run: Path) -> None:
        super().__init__(run, keep=5)
        self.begun, self.go = threading.Event(), threading.Event()

    def write(self, step: int, state: Mapping[str, Any], **options: Any) -> Path:
        self.begun.set()
        assert self.go.wait(10)
        return super().write(step, state, **options)


@dataclass(frozen=True)
class Memory:
    """Memory that has one state."""

    state: Checkpoint

    def newest(self) -> Checkpoint:
        return self.state


def writer_to(checkpoints: Checkpoints, **more: Any) -> CheckpointWriter:
    more = {"membership": GivenMembership(), **more}
    return CheckpointWriter(checkpoints, constant={"config": {"a": 1}}, **more)


def checkpoint(step: int, weight: Tensor | None = None, **more: Any) -> Checkpoint:
    weight = torch.full((2,), float(step)) if weight is None else weight
    state = {"model": {"weight": weight, **more}, "optimizer": {}, "position": {"number": step}}
    return Checkpoint(
        name=SnapshotName("g", step), step=step, state=state, parameters={"weight": weight}
    )


def written(folder: Path, step: int) -> dict[str, Any]:
    return read_checkpoint(folder / "checkpoints" / f"step-{step:08}.pt")


def test_a_checkpoint_is_written_with_what_is_constant(tmp_path: Path) -> None:
    writer = writer_to(Checkpoints(tmp_path, 5))
    writer.publish(checkpoint(1))
    writer.wait()
    assert torch.equal(written(tmp_path, 1)["model"]["weight"], torch.ones(2))
    assert written(tmp_path, 1)["position"] == {"number": 1}
    assert written(tmp_path, 1)["config"] == {"a": 1}
    assert writer.published.get() == (1, tmp_path / "checkpoints" / "step-00000001.pt")


def test_a_second_checkpoint_follows_the_first(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    writer = writer_to(disk)
    writer.publish(checkpoint(1))
    assert disk.begun.wait(10)
    assert not (tmp_path / "checkpoints").exists()
    disk.go.set()
    writer.publish(checkpoint(2))
    writer.wait()
    assert [writer.published.get()[0] for _ in range(2)] == [1, 2]


def test_a_write_that_hangs_does_not_prevent_the_end_of_the_process(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    writer = writer_to(disk)
    before = threading.enumerate()  # perhaps with a writer of an earlier test
    writer.publish(checkpoint(1))
    assert disk.begun.wait(10)
    started = [one for one in threading.enumerate() if one not in before]
    (writing,) = [one for one in started if one.name == "checkpoint"]
    disk.go.set()
    writer.wait()
    assert writing.daemon, "Python's end waits for all other threads"


def test_a_model_is_judged_by_what_it_has_learned(tmp_path: Path) -> None:
    writer = writer_to(Checkpoints(tmp_path, 5))
    writer.publish(checkpoint(1, mask=torch.full((2,), -torch.inf)))
    writer.wait()
    assert written(tmp_path, 1)["model"]["mask"].isinf().all()
    writer.publish(checkpoint(2, torch.tensor([1.0, torch.inf])))
    writer.wait()
    assert not (tmp_path / "checkpoints" / "step-00000002.pt").exists()


def test_a_rescue_writes_the_newest_and_only_once(tmp_path: Path) -> None:
    writer = writer_to(Checkpoints(tmp_path, 5))
    writer.rescue()  # nothing yet
    newest = checkpoint(2)
    writer.memory = Memory(newest)
    writer.rescue()
    file = tmp_path / "checkpoints" / "step-00000002.pt"
    assert torch.equal(written(tmp_path, 2)["model"]["weight"], torch.full((2,), 2.0))
    file.unlink()
    writer.rescue()
    assert not file.exists()


def test_a_rescue_while_the_same_checkpoint_is_written_writes_it_once(tmp_path: Path) -> None:
    disk, newest = SlowDisk(tmp_path), checkpoint(1)
    writer = writer_to(disk)
    writer.memory = Memory(newest)
    writer.publish(newest)
    assert disk.begun.wait(10)
    rescue = threading.Thread(target=writer.rescue)
    rescue.start()
    disk.go.set()
    rescue.join(10)
    writer.wait()
    assert writer.published.qsize() == 1


def test_a_broken_model_is_not_published(tmp_path: Path) -> None:
    reports: list[str] = []
    writer = writer_to(Checkpoints(tmp_path, 5), report=reports.append)
    for step in (4, 8):
        writer.publish(checkpoint(step, torch.tensor([0.0, torch.nan])))
        writer.wait()
    assert not (tmp_path / "checkpoints").exists()
    assert reports == [
        "parameters are NaN or infinite before step 4: they are not saved. The checkpoints of "
        "earlier steps are valid."
    ]


def test_a_disk_that_refuses_is_reported_at_the_next_occasion(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    writer = writer_to(Checkpoints(tmp_path, 5))
    writer.publish(checkpoint(1))
    with pytest.raises(CheckpointError, match="can't be written"):
        writer.wait()
    writer.wait()  # reported once


def test_a_rescue_names_the_newest_file_whoever_wrote_it(tmp_path: Path) -> None:
    writer = writer_to(Checkpoints(tmp_path, 5))
    assert writer.rescue() is None
    writer_to(Checkpoints(tmp_path, 5)).publish(checkpoint(3))
    wait_for_thread()
    assert writer.rescue() == 3
    writer.memory = Memory(checkpoint(7))
    assert writer.rescue() == 7


def wait_for_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(10)


def test_a_process_outside_the_world_writes_no_file_but_a_rescued_one(tmp_path: Path) -> None:
    asked, answered = threading.Event(), threading.Event()

    def may_write() -> bool:
        """Wait, as for the outcome of a vote, until the process is known to be outside."""
        asked.set()
        assert answered.wait(10)
        return False

    membership = GivenMembership(may_write=may_write)
    writer = writer_to(Checkpoints(tmp_path, 5), membership=membership)
    writer.publish(checkpoint(1))
    assert asked.wait(10)
    assert not (tmp_path / "checkpoints").exists()  # before the answer
    answered.set()
    writer.wait()
    assert not (tmp_path / "checkpoints").exists()
    assert writer.published.empty()
    writer.memory = Memory(checkpoint(2))
    assert writer.rescue() == 2
    assert written(tmp_path, 2)["position"] == {"number": 2}


def test_a_file_whose_lease_ends_meanwhile_is_published_after_that_lease_is_renewed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    asked: list[str] = []

    def may_write() -> bool:
        asked.append("may write")
        return True

    def lease_lasts() -> bool:
        whole = [path for path in folder.iterdir() if path.stat().st_size > 0]
        assert [path.suffix for path in whole] == [".pt" if len(asked) == 4 else ".part"]
        asked.append("lasts")
        return len(asked) > 2

    membership = GivenMembership(may_write=may_write, lease_lasts=lease_lasts)
    writer = writer_to(Checkpoints(tmp_path, 5), membership=membership)
    writer.publish(checkpoint(1))
    writer.wait()
    assert asked == ["may write", "lasts", "may write", "lasts", "lasts"]
    assert [path.name for path in folder.iterdir()] == ["step-00000001.pt"]
    assert writer.published.get() == (1, folder / "step-00000001.pt")
    assert writer.published.empty()


def test_a_process_that_was_stopped_while_it_wrote_publishes_nothing_once_it_is_outside(
    tmp_path: Path,
) -> None:
    answers = [True, False]
    membership = GivenMembership(may_write=lambda: answers.pop(0), lease_lasts=lambda: False)
    writer = writer_to(Checkpoints(tmp_path, 5), membership=membership)
    writer.publish(Checkpoint(**{**vars(checkpoint(1)), "best": True}))
    writer.wait()
    assert answers == []
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert writer.published.empty()
    writer.memory = Memory(checkpoint(1))
    assert writer.rescue() == 1


def test_a_process_that_was_stopped_after_its_file_was_there_removes_no_other(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.begin_generation(0)
    writer = writer_to(checkpoints)
    writer.publish(checkpoint(1))
    writer.wait()
    lasts, may_write = [True, False], [True, False]
    writer._membership = GivenMembership(
        may_write=lambda: may_write.pop(0), lease_lasts=lambda: lasts.pop(0)
    )
    writer.publish(checkpoint(2))
    writer.wait()
    assert lasts == may_write == []
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-00000001.pt", "step-00000002.pt"}
    assert [writer.published.get()[0], writer.published.empty()] == [1, True]


class FullDisk(Checkpoints):
    """A disk without room."""

    def write(self, step: int, state: Mapping[str, Any], **options: Any) -> Path:
        raise CheckpointError(f"no room for step {step}")


def test_a_failed_write_is_found_before_the_next_file(tmp_path: Path) -> None:
    writer = writer_to(FullDisk(tmp_path, 5))
    writer.check()
    writer.publish(checkpoint(1))
    wait_for_thread()
    with pytest.raises(CheckpointError, match="no room for step 1"):
        writer.check()
    writer.check()  # once is enough
    assert writer.published.empty()


def test_a_disk_that_hangs_is_an_error_after_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.state.checkpoint_writer._LIMIT_S", 0.01)
    disk = SlowDisk(tmp_path)
    writer = writer_to(disk)
    writer.publish(checkpoint(1))
    assert disk.begun.wait(10)
    with pytest.raises(CheckpointError, match="isn't written after 0"):
        writer.publish(checkpoint(2))
    disk.go.set()
