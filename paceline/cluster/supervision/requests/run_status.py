"""How a run stands, as one of its processes reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from paceline.cluster.json_record import JsonRecord
from paceline.cluster.membership.generation import Generation


@dataclass(frozen=True, kw_only=True)
class MemberStatus:
    """A member of the run's present generation.

    Attributes:
        rank: its rank in this generation.
        role: "worker" or "server".
        host: its machine's host name.
        pid: its process; None where the reporting process doesn't know it.
    """

    id: str
    rank: int
    role: str
    machine: int
    host: str
    pid: int | None = None


@dataclass(frozen=True, kw_only=True)
class MemberLoss:
    """A lost member of an earlier generation.

    Attributes:
        generation: the number of the generation from which it was lost.
        cause: the evidence, a sentence.
        seconds: what the loss cost, from its detection to the first new step; None if unknown.
    """

    member: str
    generation: int
    cause: str
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunStatus(JsonRecord):
    """Status of a run.

    Attributes:
        generation: the number of the present generation.
        step: the number of completed steps; None where the reporting process doesn't know it.
        total_steps: the number of steps of the whole run; None where it isn't known.
        samples_per_second: the recent speed of all ranks together; None: not measured yet.
        members: the members, in rank order.
        losses: the lost members, the earliest first.
    """

    generation: int
    step: int | None
    total_steps: int | None = None
    samples_per_second: float | None = None
    members: tuple[MemberStatus, ...] = ()
    losses: tuple[MemberLoss, ...] = ()

    @classmethod
    def of(
        cls,
        generation: Generation,
        step: int | None,
        *,
        total_steps: int | None = None,
        samples_per_second: float | None = None,
        losses: tuple[MemberLoss, ...] = (),
    ) -> Self:
        """Return the status of a run in a generation; its processes' numbers aren't in it."""
        return cls(
            generation=generation.number,
            step=step,
            total_steps=total_steps,
            samples_per_second=samples_per_second,
            members=tuple(
                MemberStatus(
                    id=member.id,
                    rank=rank,
                    role=member.role,
                    machine=member.machine,
                    host=member.host,
                )
                for rank, member in enumerate(generation.members)
            ),
            losses=losses,
        )
