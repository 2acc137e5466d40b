"""TensorBoard's event files of a run, read back by TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from paceline.observe.trackers.tensorboard_writer import TensorBoardWriter
from paceline.observe.trackers.tracker import Point
from tests.harness.library.tracked_runs import (
    EPOCHS,
    STEPS,
    Killed,
    curves,
    tensorboard_of,
    train,
)

ALL = range(EPOCHS * STEPS)


def test_values_notes_and_parameters_are_read_back(tmp_path: Path) -> None:
    parameters = {"batch_size": 32, "augment": "pad", "sync_bn": False, "mean": (1.0, 2.0)}
    writer = TensorBoardWriter(tmp_path, parameters)
    writer.write([Point(0, {"a": 1.5, "b": float("nan")}, 1000.0), Point(1, {"a": 2.5}, 1001.0)])
    writer.note("a *note*", 1)
    writer.close(complete=True)
    read = tensorboard_of(tmp_path)
    assert [(e.step, e.value, e.wall_time) for e in read.Scalars("a")] == [
        (0, 1.5, 1000.0),
        (1, 2.5, 1001.0),
    ]
    assert read.Scalars("b")[0].value != read.Scalars("b")[0].value
    (note,) = read.Tensors("notes/text_summary")
    assert (note.step, note.tensor_proto.string_val) == (1, [b"a *note*"])
    (told,) = (
        data.session_start_info.hparams
        for content in read.PluginTagToContent("hparams").values()
        if (data := HParamsPluginData.FromString(content)).HasField("session_start_info")
    )
    assert told["batch_size"].number_value == 32
    assert told["augment"].string_value == "pad"
    assert told["sync_bn"].bool_value is False
    assert told["mean"].string_value == "(1.0, 2.0)"


def test_values_of_repeated_steps_replace_the_earlier_ones(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, {})
    writer.write([Point(step, {"a": 1.0}) for step in range(6)])
    writer.go_back(3)
    writer.write([Point(2, {"b": 5.0}), Point(3, {"a": 2.0})])
    writer.close(complete=True)
    assert curves(tensorboard_of(tmp_path)) == {
        "a": {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0},
        "b": {2: 5.0},
    }


def test_a_script_logs_its_steps_and_its_own_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logged = train(tmp_path / "run", "tensorboard")
    read = tensorboard_of(tmp_path / "run")
    found = curves(read)
    assert found["loss"] == pytest.approx(logged["loss"])
    assert found["train/epoch"] == {step: step // STEPS for step in ALL}
    assert set(found["step/exposed_ms"]) == set(ALL)
    assert set(found["step/time_ms"]) == {step for step in ALL if step % STEPS}
    shown = f"tensorboard shows this run in {tmp_path}/run/tensorboard."
    assert capsys.readouterr().err == f"paceline: {shown}\n"


def test_a_resumed_script_goes_on_in_the_same_curves(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(tmp_path, "tensorboard", die_before=8, snapshots=False)
    first = curves(tensorboard_of(tmp_path))
    assert set(first["loss"]) == set(range(8))  # it resumes from the checkpoint of step 5
    logged = train(tmp_path, "tensorboard", snapshots=False)
    assert set(logged["loss"]) == set(range(5, EPOCHS * STEPS))
    whole = curves(tensorboard_of(tmp_path))
    assert set(whole["loss"]) == set(ALL)
    assert {step: whole["loss"][step] for step in range(5, len(ALL))} == pytest.approx(
        logged["loss"]
    )
    (events, *_) = sorted(tmp_path.glob("events.*.jsonl"))
    kinds = {json.loads(line)["event"] for line in events.read_text().splitlines()}
    assert "log" not in kinds  # the ledger's files are as they were
