"""What a supervisor reports of a worker's end, and the endpoint that passes it on to the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.cluster.stores.failure_report import FailureReport


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """End of a worker, as its supervisor reports it.

    Attributes:
        local_rank: the worker's, in the start's first generation.
        member: the worker's member id; "" for a server.
        name: what messages call the worker.
        text: how it ended, a sentence that begins with the name.
        failed: whether it didn't end well.
    """

    local_rank: int
    member: str
    name: str
    text: str
    failed: bool


class SupervisorEndpoint(Protocol):
    """Supervisor's end of the connections to the run's members."""

    def name_of(self, member: str) -> str:
        """Name a member for messages, by its rank in the newest generation that it was in."""

    def exited(self, end: WorkerExit) -> None:
        """Report the end of a worker to the members that are connected; never waits."""

    def end_run(self, failure: FailureReport) -> None:
        """Report to the members of all machines why the run ends; never waits."""

    def is_lost(self, machine: int) -> bool:
        """Return whether the run continues without a machine, as far as that is known here."""

    def ended_without(self, member: str) -> bool:
        """Return whether the world has continued without a member, and has ended since."""

    def await_change(self, limit: float) -> None:
        """Wait, while members are connected, until they continue without this machine.

        Until then the machine has a vote.

        Args:
            limit: seconds to wait.
        """

    def close(self) -> None:
        """End the connections; all workers of the machine have ended."""
