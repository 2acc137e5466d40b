"""The leader's recorders are open while a member is rank 0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline.observe.leader_recorder import LeaderRecorder
from paceline.recorder import NullRecorder


class Shown(NullRecorder):
    """Recorder that lists what it is given, and its end."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        lines.append("open")

    def event(self, name: str, **fields: Any) -> None:
        self._lines.append(name)

    def close(self) -> None:
        self._lines.append("close")


def test_recorders_are_opened_and_closed_as_the_leader_changes() -> None:
    lines: list[str] = []
    leader = SimpleNamespace(leads=False)
    recorder = LeaderRecorder(leader, lambda: [Shown(lines)])
    recorder.event("step")
    assert lines == []
    leader.leads = True
    recorder.event("run")
    recorder.event("step")
    assert lines == ["open", "run", "step"]
    leader.leads = False
    recorder.event("step")
    assert lines == ["open", "run", "step", "close"]
    leader.leads = True
    recorder.event("run")
    recorder.close()
    recorder.close()
    assert lines[4:] == ["open", "run", "close"]
