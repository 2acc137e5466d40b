"""Records of a run's living processes, in the run's folder: `members/<name>.json`.

Each worker and each supervisor writes one while it is part of the run. A record outlives a killed
process, so a reader believes the kernel: the record counts where its process, identified by number
and start time, runs on this machine. The next start of a machine removes that machine's records.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.atomic_write import explained_writes, write_atomically
from paceline.cluster.json_record import JsonRecord
from paceline.cluster.membership.process_identity import ProcessIdentity, ask_kernel
from paceline.errors import CommError

FOLDER = "members"
_ATTEMPTS = 10


@dataclass(frozen=True, kw_only=True)
class MemberRecord(JsonRecord):
    """Record of one process of a run.

    Attributes:
        id: the member's id; `supervisor-<machine>` for a supervisor.
        role: what the process is; a supervisor is no member of a generation.
        socket: name of the abstract Unix socket at which it answers requests.
    """

    id: str
    role: Literal["worker", "server", "supervisor"]
    machine: int
    process: ProcessIdentity
    socket: str

    def path(self, run: Path) -> Path:
        """Return the record's file."""
        return run / FOLDER / f"{self.id}.json"

    def write(self, run: Path) -> None:
        """Write the record into the run's folder.

        Raises:
            PacelineError: the folder can't be written.
        """
        path = self.path(run)
        with explained_writes(path):
            for _ in range(_ATTEMPTS):
                path.parent.mkdir(exist_ok=True)
                with suppress(FileNotFoundError):  # the last record was removed at this moment
                    return write_atomically(path, self.to_text())
            write_atomically(path, self.to_text())

    def remove(self, run: Path) -> None:
        """Remove the record, and the folder after the last one.

        A record in a folder that can't be written stays; its process will have ended.
        """
        path = self.path(run)
        with suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()


@dataclass(frozen=True, kw_only=True)
class RunProcesses:
    """Processes that a run's records name.

    Attributes:
        here: those that run on this machine.
        elsewhere: those of other machines, or of this one before it was restarted; whether they
            still run isn't known here.
        ended: those of this machine that have ended without removing their record.
    """

    here: tuple[MemberRecord, ...]
    elsewhere: tuple[MemberRecord, ...]
    ended: tuple[MemberRecord, ...]

    @classmethod
    def of(cls, run: Path) -> RunProcesses:
        """Read a run's records, and ask this machine's kernel about their processes."""
        own = ProcessIdentity.of_this_process()
        found: dict[str, list[MemberRecord]] = {"runs": [], "ended": [], "elsewhere": []}
        for record in read_records(run):
            found[ask_kernel(record.process, own)].append(record)
        return cls(
            here=tuple(found["runs"]),
            elsewhere=tuple(found["elsewhere"]),
            ended=tuple(found["ended"]),
        )


def read_records(run: Path) -> Iterator[MemberRecord]:
    """Read a run's records, in the order of their names; a file that is no record is skipped."""
    folder = run / FOLDER
    names = list[str]()
    with suppress(OSError):  # there is none; `glob` fails where it is removed at this moment
        names = sorted(os.listdir(folder))
    for name in names:
        if name.endswith(".json"):
            with suppress(OSError, CommError):  # removed since, or another version's
                yield MemberRecord.from_text((folder / name).read_bytes())


def remove_records_of_machine(run: Path, machine: int) -> None:
    """Remove the records of a machine whose part of the run folder this process has locked."""
    for record in read_records(run):
        if record.machine == machine:
            record.remove(run)


def remove_ended_records(run: Path, machine: int) -> None:
    """Remove the records of a machine's processes that have ended, as its last process does."""
    for record in RunProcesses.of(run).ended:
        if record.machine == machine:
            record.remove(run)
