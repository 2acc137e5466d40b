"""A process's presence in a run: its record in the run's folder, and the socket that answers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

from paceline.cluster.membership.generation import Member
from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.supervision.requests.member_record import MemberRecord
from paceline.cluster.supervision.requests.run_socket import RunSocket
from paceline.cluster.supervision.requests.run_status import RunStatus


class RunPresence:
    """Presence of this process in a run, until `close`; it answers the requests of the run's user.

    Args:
        run: the run's folder, which exists.
        id: the member's id; `supervisor-<machine>` for a supervisor.
        role: what the process is.
        report: returns the run's status at once; called in another thread.

    Raises:
        PacelineError: the folder can't be written.
    """

    def __init__(
        self,
        run: Path,
        *,
        id: str,
        role: Literal["worker", "server", "supervisor"],
        machine: int,
        report: Callable[[], RunStatus],
    ) -> None:
        self._run = run
        self._report = report
        self._socket = RunSocket(self)
        self._record = MemberRecord(
            id=id,
            role=role,
            machine=machine,
            process=ProcessIdentity.of_this_process(),
            socket=self._socket.name,
        )
        try:
            self._record.write(run)
        except BaseException:
            self._socket.close()
            raise

    @classmethod
    def of_member(cls, run: Path, member: Member, *, report: Callable[[], RunStatus]) -> Self:
        """Make a member present; the arguments are those of the class."""
        return cls(run, id=member.id, role=member.role, machine=member.machine, report=report)

    def stop(self) -> None:
        """End this process, and with it the run on all machines, as SIGTERM does."""
        os.kill(os.getpid(), signal.SIGTERM)

    def status(self) -> RunStatus:
        """Return the run's status."""
        return self._report()

    def close(self) -> None:
        """Remove the record, and close the socket."""
        self._record.remove(self._run)
        self._socket.close()
