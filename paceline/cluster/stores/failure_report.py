"""Failure reports: why a run ended, and which of several reasons is the cause.

When a worker fails, its peers lose their connections to it and fail too. Theirs are consequences;
the user sees the cause once. A report that is read from the store or from a worker's error file is
never of a good end: its status 0 becomes 1. The one report with status 0 never leaves its process:
a supervisor's on a run that an earlier start finished.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from paceline.cluster.json_record import JsonRecord
from paceline.errors import CommError, CommTimeout, PacelineError, PeerLost

FAILURE = "failure"
"""The key, in the store, of the first report on why a run ended."""


@dataclass(frozen=True, kw_only=True)
class FailureReport(JsonRecord):
    """Failure report: the reason why a run ends, and the resulting exit status.

    Attributes:
        text: the reason, as a sentence or as the traceback of an unexpected error.
        status: the exit status of the command.
        consequence: whether this failure is only a consequence of another process's failure.
        of_call: whether it is of a call that all ranks must make (`CommError.of_call`).
    """

    text: str
    status: int
    consequence: bool = False
    of_call: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Describe an error: ours by its sentence, any other by its traceback."""
        if isinstance(error, PacelineError):
            waited = isinstance(error, CommTimeout) and not error.of_call
            consequence = isinstance(error, PeerLost) or waited
            text = f"{error} {error.remedy}" if isinstance(error, PeerLost) else str(error)
            of_call = isinstance(error, CommError) and error.of_call
            return cls(text=text, status=error.status, consequence=consequence, of_call=of_call)
        text = "".join(traceback.format_exception(error)).rstrip()
        # torch's errors of a store or a process group follow from another process's end.
        return cls(text=text, status=1, consequence=isinstance(error, DistError))

    @classmethod
    def of_status(cls, status: int) -> Self:
        """Describe the end that a process itself asked for."""
        return cls(text=f"ended with status {status}.", status=status)

    @classmethod
    def of_signal(cls, number: signal.Signals) -> Self:
        """Describe the end of a process that a signal stops."""
        return cls(text=f"stopped by {number.name}.", status=128 + number)

    @classmethod
    def of_exit(cls, process: str, returncode: int | None) -> Self:
        """Describe the end of a process that left no report.

        Args:
            process: its name.
            returncode: its exit status; negative: the number of the signal that killed it; None:
                the parent process, which knew it, was killed.
        """
        if returncode is None:
            return cls(text=f"{process} ended without a report.", status=1)
        if returncode >= 0:
            # A worker that a signal stopped left a report; the others stop with it, and leave none.
            stopped = returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
            text = f"{process} ended with status {returncode}."
            return cls(text=text, status=returncode, consequence=stopped)
        hint = ""
        if -returncode == signal.SIGKILL:
            hint = " If no user killed it, the machine ran out of memory: try a smaller batch."
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-returncode, f"signal {-returncode}")  # real-time signals have no names
        return cls(text=f"{process} was killed by {name}.{hint}", status=1)

    def by(self, process: str) -> Self:
        """Return the report with the name of the process that failed in front."""
        return replace(self, text=f"{process}: {self.text}")

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Read what `to_text` wrote; any status but 1 to 255, 0 above all, becomes 1.

        Raises:
            CommError: the text is something else.
        """
        report = super().from_text(text)
        valid = isinstance(report.status, int) and 0 < report.status < 256
        return report if valid else replace(report, status=1)


def post(store: Store, failure: FailureReport) -> FailureReport:
    """Give a reason for the run's end; return the one that came first."""
    return FailureReport.from_text(store.compare_set(FAILURE, "", failure.to_text()))


def cause(failures: Iterable[FailureReport]) -> FailureReport | None:
    """Return the first failure that isn't another's consequence.

    Where all are consequences, it is the first of a call that all ranks must make: a peer that
    didn't make it timed out in what it does instead, and ended first. Else it is the first of all.
    """
    # `min` returns the first of equals: of several causes the one that was reported first.
    return min(failures, key=lambda one: (one.consequence, not one.of_call), default=None)
