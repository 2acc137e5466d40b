"""MLflow's run, read back by MLflow's client; `make trackers` installs MLflow for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.observe.trackers.tracker import Point
from tests.harness.library.tracked_runs import EPOCHS, STEPS, Killed, train

pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings("ignore")  # of its own dependencies

ALL = set(range(EPOCHS * STEPS))


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")


def test_many_values_and_parameters_are_read_back(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    from paceline.observe.trackers.mlflow_writer import MlflowWriter

    parameters = {f"parameter_{number}": number for number in range(150)}
    writer = MlflowWriter(tmp_path, {**parameters, "empty": "", "mean": (1.0, 2.0)})
    writer.write([Point(step, {"a/b": step / 2, "c": 1.0}, 1000.5) for step in range(1200)])
    writer.note("one", 3)
    writer.note("two", 3)
    writer.close(complete=True)
    client, run = MlflowClient(), (tmp_path / "mlflow.id").read_text().strip()
    read = client.get_run(run)
    assert read.info.run_name == tmp_path.name
    assert read.info.status == "FINISHED"
    assert read.data.params == {name: str(value) for name, value in parameters.items()} | {
        "empty": "",
        "mean": "(1.0, 2.0)",
    }
    assert read.data.tags["note.step_3"] == "one\ntwo"
    history = client.get_metric_history(run, "a/b")
    assert [(m.step, m.value, m.timestamp) for m in history] == [
        (step, step / 2, 1_000_500) for step in range(1200)
    ]


def test_a_resumed_run_continues_the_same_mlflow_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setattr(sys, "argv", [*sys.argv, "--redis_url", "redis://:SECRET@host:1"])
    folder, client = tmp_path / "run", MlflowClient()
    with pytest.raises(Killed):
        train(folder, "mlflow", die_before=8, snapshots=False)
    run = (folder / "mlflow.id").read_text().strip()
    assert client.get_run(run).info.status == "KILLED"
    logged = train(folder, "mlflow", snapshots=False)
    assert (folder / "mlflow.id").read_text().strip() == run
    read = client.get_run(run)
    assert read.info.status == "FINISHED"
    assert read.data.params == {"seed": "0", "world_size": "1", "device": "cpu"}
    values = {m.step: m.value for m in client.get_metric_history(run, "loss")}
    assert set(values) == ALL
    assert {step: values[step] for step in logged["loss"]} == pytest.approx(logged["loss"])
    assert b"SECRET" not in (tmp_path / "mlflow.db").read_bytes()
