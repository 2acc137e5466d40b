"""A process's access to its machine's acceptor record: it answers requests, acknowledges, learns.

The record is replaced before an answer is sent. All processes of a machine give the same answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paceline.cluster.membership.acceptor_record import AcceptorRecord
from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.voting.acceptor import (
    MachineRecord,
    acknowledge,
    answer,
)
from paceline.cluster.membership.voting.messages import Answer, Held, Request, machine_name

_T = TypeVar("_T")


class MachineAcceptor:
    """Machine as an acceptor, by its record; used from any thread.

    Args:
        record: the machine's record, which it closes.
    """

    def __init__(self, record: AcceptorRecord, machine: int) -> None:
        self._record = record
        self.machine = machine
        self._seen: tuple[int, MachineRecord] = (-1, MachineRecord())

    @property
    def name(self) -> str:
        """The machine's name as an acceptor."""
        return machine_name(self.machine)

    def answer(self, request: Request) -> Answer | None:
        """Answer a request; None where this machine has no vote.

        Raises:
            CommError: the record can't be replaced: another process was stopped while it did.
        """
        return self._update(lambda record: answer(record, self.name, request))

    def acknowledge(self, generation: Generation, member: str, held: tuple[Held, ...]) -> bool:
        """Record what a member holds; return False where nothing may be acknowledged any more."""
        # Without the lock: each snapshot asks, and nearly always there is no vote.
        if self.has_promised(generation):
            return False
        return self._update(lambda record: acknowledge(record, generation, member, held))

    def learn(self, value: Generation) -> None:
        """Record a decided generation, whose successor is voted upon from now on."""
        self._update(lambda record: (record.in_generation(value), None))

    def has_promised(self, generation: Generation) -> bool:
        """Return whether the machine takes part in the vote on a generation's successor."""
        return self._read().has_promised(generation)

    def successor_of(self, generation: Generation) -> Generation | None:
        """Return the successor of a generation, if it is known here."""
        return self._read().successor_of(generation.id)

    def close(self) -> None:
        """Unmap the record."""
        self._record.close()

    def _read(self) -> MachineRecord:
        version = self._record.version
        if self._seen[0] != version:  # one that is newer than `version` is read again next time
            self._seen = version, MachineRecord.read(self._record.read())
        return self._seen[1]

    def _update(self, change: Callable[[MachineRecord], tuple[MachineRecord, _T]]) -> _T:
        version = -1
        after = MachineRecord()

        def changed(text: str) -> tuple[str, _T]:
            nonlocal version, after
            version = self._record.version
            # Parsing takes most of an update's time, and other processes change the record rarely.
            before = self._seen[1] if self._seen[0] == version else MachineRecord.read(text)
            after, result = change(before)
            if after is before:
                return text, result
            new = after.to_text()
            version += new != text  # an equal one isn't written
            return new, result

        result = self._record.update(changed)
        self._seen = version, after
        return result
