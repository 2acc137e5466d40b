"""Why a run ended: what one process tells another, and which of several reasons is the cause.

When a worker fails, its peers lose their connections to it and fail too. Theirs are consequences;
the person is told the cause, once.
"""

from __future__ import annotations

import json
import signal
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from torch.distributed import DistError

from paceline.atomic_write import write_atomically
from paceline.errors import CommTimeout, PacelineError, PeerLost

_LOST = "See what became of it, and give the same command again."


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """A reason to end a run.

    Attributes:
        text: a sentence, or the traceback of an error that nobody foresaw.
        status: the exit status that a command ends with.
        consequence: whether it only follows from another process's failure.
    """

    text: str
    status: int
    consequence: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Describe an error: ours by its sentence, any other by its traceback."""
        if isinstance(error, PacelineError):
            consequence = isinstance(error, (PeerLost, CommTimeout))
            text = f"{error} {_LOST}" if isinstance(error, PeerLost) else str(error)
            return cls(text=text, status=error.status, consequence=consequence)
        text = "".join(traceback.format_exception(error)).rstrip()
        return cls(text=text, status=1, consequence=isinstance(error, DistError))

    @classmethod
    def of_status(cls, status: int) -> Self:
        """Describe the end that a process itself asked for."""
        return cls(text=f"ended with status {status}.", status=status)

    @classmethod
    def of_exit(cls, whom: str, returncode: int) -> Self:
        """Describe the end of a process that left no word; negative codes are signals."""
        if returncode >= 0:
            return cls(text=f"{whom} ended with status {returncode}.", status=returncode)
        hint = ""
        if -returncode == signal.SIGKILL:
            hint = " If nobody did that, the machine ran out of memory: try a smaller batch."
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-returncode, f"signal {-returncode}")  # real-time signals have no names
        return cls(text=f"{whom} was killed by {name}.{hint}", status=1)

    def by(self, whom: str) -> Self:
        """Return the failure with the name of who failed in front."""
        return replace(self, text=f"{whom}: {self.text}")

    def to_text(self) -> str:
        """Return the failure as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Read what `to_text` wrote."""
        return cls(**json.loads(text))

    def write(self, path: Path) -> None:
        """Write the failure to a file, whole or not at all."""
        write_atomically(path, self.to_text())


def cause(failures: Iterable[FailureReport]) -> FailureReport | None:
    """Return the first failure that isn't another's consequence, else the first of all."""
    failures = list(failures)
    primary = [failure for failure in failures if not failure.consequence]
    return next(iter(primary or failures), None)
