"""Session: opens, resumes and records a run, for the command and for the library."""

from paceline.session.checks import check
from paceline.session.command_trainer import build_trainer
from paceline.session.connect import open_run
from paceline.session.recorders import (
    build_leader_recorder,
    build_recorder,
    build_trace,
    build_trackers,
    report_recovery,
)
from paceline.session.resume.start import Start, find_start

__all__ = [
    "Start",
    "build_leader_recorder",
    "build_recorder",
    "build_trace",
    "build_trackers",
    "build_trainer",
    "check",
    "find_start",
    "open_run",
    "report_recovery",
]
