"""TensorBoard: event files in the run's folder, `<run folder>/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter
from torch.utils.tensorboard.summary import hparams, text

from paceline.observe.trackers.tracker import Point


class TensorBoardWriter:
    """Writer of TensorBoard's event files, one for each start of the run.

    The values of a step are one event: `SummaryWriter` writes one for each value, which costs four
    times as much. The configuration is in the HParams plugin.

    Args:
        folder: the run's folder.
        parameters: the run's configuration.
    """

    def __init__(self, folder: Path, parameters: Mapping[str, object]) -> None:
        self.place = str(folder / "tensorboard")
        self._file = FileWriter(self.place)
        plain = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in parameters.items()
        }
        for summary in hparams(plain, {}):
            self._file.add_summary(summary, 0)

    def write(self, points: Sequence[Point]) -> None:
        """Write values, and bring them to the file."""
        for point in points:
            values = [
                Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()
            ]
            self._file.add_summary(Summary(value=values), point.step, point.time)
        self._file.flush()

    def note(self, text_: str, step: int) -> None:
        """Write a sentence under the tag `notes`."""
        self._file.add_summary(text("notes", text_), step)

    def go_back(self, step: int) -> None:
        """Let readers drop the values from `step` on, as `SummaryWriter(purge_step=…)` does."""
        self._file.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step)

    def close(self, *, complete: bool) -> None:
        """Write out what is left."""
        self._file.close()
