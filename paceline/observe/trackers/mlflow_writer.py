"""MLflow: one MLflow run for the run, whose id is in the run's folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from paceline.atomic_write import write_atomically
from paceline.observe.trackers.tracker import Point

ID_NAME = "mlflow.id"  # the file of the id
# Limits of MLflow's REST API: the numbers of a request, and the length of a text.
_METRICS = 1000
_PARAMETERS = 100
_TEXT = 5000


class MlflowWriter:
    """Writer of an MLflow run; a resumed run continues it.

    Server and experiment are those of MLflow's environment variables. Parameters are written once:
    MLflow refuses to change them.

    Args:
        folder: the run's folder.
        parameters: the run's configuration.
    """

    def __init__(self, folder: Path, parameters: Mapping[str, object]) -> None:
        path = folder / ID_NAME
        known = path.read_text().strip() if path.exists() else None
        self._id = mlflow.start_run(run_id=known, run_name=folder.name).info.run_id
        self._client = MlflowClient()
        self._notes = defaultdict[int, str](str)
        if known is None:
            all_of_them = [Param(name, str(value)) for name, value in parameters.items()]
            for some in _pieces(all_of_them, _PARAMETERS):
                self._client.log_batch(self._id, params=some)
            write_atomically(path, f"{self._id}\n")
        scheme, separator, rest = mlflow.get_tracking_uri().partition("://")
        self.place = f"{scheme}{separator}{rest.rpartition('@')[2]}, run {self._id}"

    def write(self, points: Sequence[Point]) -> None:
        """Write values, many with each request."""
        metrics = [
            Metric(name, value, round(point.time * 1e3), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for some in _pieces(metrics, _METRICS):
            self._client.log_batch(self._id, metrics=some)

    def note(self, text: str, step: int) -> None:
        """Write a sentence as the tag `note.step_<step>`, below earlier ones of that step."""
        self._notes[step] = f"{self._notes[step]}\n{text}".strip()[:_TEXT]
        self._client.set_tag(self._id, f"note.step_{step}", self._notes[step])

    def go_back(self, step: int) -> None:
        """Keep the earlier values: MLflow can't remove them."""

    def close(self, *, complete: bool) -> None:
        """Set the run's status; a resumed run sets it back."""
        mlflow.end_run("FINISHED" if complete else "KILLED")


def _pieces(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
