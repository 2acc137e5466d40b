"""What a tracker gets of a run's events, and that its failures don't reach the run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import ConfigError
from paceline.config.run import TRACKER_NAMES, OutputConfig
from paceline.errors import Message
from paceline.observe.trackers import tracker as module
from paceline.observe.trackers.tracker import Point, Tracker, Writer
from paceline.observe.trackers.trackers import TRACKERS, require_installed
from tests.harness.library.tracked_runs import MemoryWriter, train


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is printed."""
    said: list[str] = []
    monkeypatch.setattr(module, "print_message", said.append)
    return said


def tracker_of(
    open_writer: Callable[[], Writer], clock: Callable[[], float] = lambda: 0.0, **options: Any
) -> Tracker:
    return Tracker("memory", open_writer, clock=clock, **options)


def step(tracker: Tracker, number: int, *, epoch: int = 0, **fields: Any) -> None:
    tracker.event("step", step=number, epoch=epoch, samples=64, first=0, sums=[], **fields)


def test_each_event_becomes_values_of_its_step(said: list[str]) -> None:
    writer, times = MemoryWriter(), iter([10.0, 10.5, 30.0, 30.25])
    tracker = tracker_of(lambda: writer, lambda: next(times))
    tracker.event("run", model="m")
    tracker.event("note", text=Message("use {--sync}"))
    tracker.event("restore", step=0)
    step(tracker, 0, learning_rate=0.1)
    step(tracker, 1, learning_rate=0.1, exposed_ms=2.5, sent=100, compute_ms=1.0)
    tracker.event("loss", generation=0, step=0, loss=3.0)
    tracker.event("epoch", epoch=0, loss=2.0, accuracy=0.5, test_accuracy=None, top5=None)
    step(tracker, 2, epoch=1)
    step(tracker, 3, epoch=1)
    tracker.event("step", step=3, epoch=1, first=0)  # a batch that another step trained too
    tracker.event("log", step=3, values={"own": 7.0})
    tracker.event("epoch", epoch=1, loss=1.0, accuracy=0.75, test_accuracy=0.7, top5=0.9)
    tracker.event("finish", stopped=False)
    tracker.close()
    assert said == ["memory shows this run in memory."]
    assert writer.notes == [(0, "use --sync")]
    assert writer.restored == [0]
    assert writer.complete is True
    assert writer.points == [
        (0, {"train/epoch": 0, "train/learning_rate": 0.1}),
        (
            1,
            {
                **{"train/epoch": 0, "train/learning_rate": 0.1, "step/exposed_ms": 2.5},
                **{"step/sent_bytes": 100, "step/time_ms": 500.0},
                "train/samples_per_second": 128.0,
            },
        ),
        (0, {"train/loss": 3.0}),
        (1, {"epoch/loss": 2.0, "epoch/accuracy": 0.5}),
        (2, {"train/epoch": 1}),  # no time: an evaluation came between
        (3, {"train/epoch": 1, "step/time_ms": 250.0, "train/samples_per_second": 256.0}),
        (3, {"own": 7.0}),
        (
            3,
            {
                **{"epoch/loss": 1.0, "epoch/accuracy": 0.75},
                **{"epoch/test_accuracy": 0.7, "epoch/test_top5": 0.9},
            },
        ),
    ]


@pytest.mark.parametrize("stopped", [True, None])
def test_a_run_that_is_stopped_or_fails_is_incomplete(stopped: bool | None) -> None:
    writer = MemoryWriter()
    tracker = tracker_of(lambda: writer)
    if stopped is not None:
        tracker.event("finish", stopped=stopped)
    tracker.close()
    assert writer.complete is False


def test_a_writer_that_cant_be_opened_is_one_note(said: list[str]) -> None:
    def refuse() -> Writer:
        raise OSError("no network.\nmany more lines")

    tracker = tracker_of(refuse)
    for number in range(3):
        step(tracker, number)
    tracker.close()
    assert said == ["memory failed, and the run continues without it: OSError: no network."]


def test_a_writer_that_fails_in_mid_run_is_one_note(said: list[str]) -> None:
    class Failing(MemoryWriter):
        def write(self, points: Sequence[Point]) -> None:
            super().write(points)
            if any(point.step == 1 for point in points):
                raise ConfigError("the server refuses.")

    writer = Failing()
    tracker = tracker_of(lambda: writer)
    step(tracker, 0)
    step(tracker, 1)
    tracker._thread.join(30)
    step(tracker, 2)  # ignored
    tracker.close()
    assert said[1:] == ["memory failed, and the run continues without it: the server refuses."]
    assert [step for step, _ in writer.points] == [0, 1]


def test_a_writer_that_hangs_delays_neither_steps_nor_the_end(said: list[str]) -> None:
    opened = threading.Event()

    def hang() -> Writer:
        opened.wait(60)
        return MemoryWriter()

    tracker = tracker_of(hang, end_s=0.01)
    for number in range(30_000):
        step(tracker, number)
    assert said == ["memory failed, and the run continues without it: it doesn't answer."]
    tracker.event("finish", stopped=False)
    tracker.close()
    assert said[1:] == ["the last values for memory weren't all sent within 0.01 s."]
    opened.set()
    tracker._thread.join(30)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_isnt_installed_is_a_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # Python's own way to make an import fail
    said = (
        f"{{}} {name}: the package {name} isn't installed; run pip install 'paceline\\[{name}\\]'."
    )
    with pytest.raises(ConfigError, match=said.format("--tracker")):
        require_installed([name])
    with pytest.raises(ConfigError, match=said.format("^tracker")):
        paceline.join(tmp_path / "run", tracker=name)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_the_name_isnt_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nowhere_installed").mkdir()  # as W&B makes one
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="isn't installed"):
        require_installed(["nowhere_installed"])


def test_the_flag_names_trackers() -> None:
    assert OutputConfig().trackers == ()
    assert OutputConfig(tracker="mlflow, tensorboard,mlflow").trackers == ("mlflow", "tensorboard")
    assert tuple(TRACKERS) == TRACKER_NAMES
    for wrong in ("tensorbord", "wandb,", "tensorboard wandb"):
        with pytest.raises(ConfigError, match=f"--tracker {wrong}: must be one or more of tensor"):
            OutputConfig(tracker=wrong)


def test_a_script_without_a_folder_or_a_tracker(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tracker tensorboard needs a run folder: pass run="):
        paceline.join(tracker="tensorboard")
    train(tmp_path / "run", "")  # `world.log` has no effect
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_value_that_is_no_number_is_a_sentence() -> None:
    with (
        paceline.join() as world,
        pytest.raises(ConfigError, match=r"world.log\(\) got name=list: pass a number"),
    ):
        world.log(name=[1.0])  # type: ignore[arg-type]
