"""What the machines of a run write into its store, as JSON; `<i>` is a machine's number.

In the run's space:

    run                 which incarnation is the newest                         RunRecord
    beat                keeps `run` from expiring                               a counter

In the incarnation's:

    machine/<i>         who is machine i                                        MachineRegistration
    lease/<claim's id>  that machine's lease                                    a counter
    world               all claims, sealed by machine 0                         RegisteredWorld
    reach/<i>           at which addresses machine i reached each of the others
    formed/<i>          what machine i's workers need to know                   GenerationInfo
    failure             why the run ended, the first word on it                 FailureReport
    finished            machine 0 has written down that the run is finished
    left/<i>            machine i has ended and stopped its lease
    remover             which of those removes all this                         a claim's id

Values that came from the store are checked by nobody: who can write there owns the run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Self

from paceline.cluster.membership.process_identity import ProcessIdentity


@dataclass(frozen=True, kw_only=True)
class MachineRegistration:
    """One machine's entry.

    Attributes:
        id: a random name of this entry; its lease's key.
        who: the supervisor's process.
        workers: how many workers the machine brings.
        addresses: where peers may try to reach it, the preferred ones first.
        port: where it listens while they do.
    """

    id: str
    who: ProcessIdentity
    workers: int
    addresses: tuple[str, ...]
    port: int

    def to_text(self) -> str:
        """Return the claim as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """Read what `dataclasses.asdict` made."""
        who, addresses = ProcessIdentity(**values["who"]), tuple(values["addresses"])
        return cls(**(values | {"who": who, "addresses": addresses}))

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Read what `to_text` wrote."""
        return cls.from_values(json.loads(text))


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The newest start of a run: its incarnation, its number of machines, and machine 0."""

    generation: str
    machines: int
    leader: MachineRegistration

    def to_text(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Read what `to_text` wrote."""
        values = json.loads(text)
        return cls(**(values | {"leader": MachineRegistration.from_values(values["leader"])}))


@dataclass(frozen=True, kw_only=True)
class RegisteredWorld:
    """All machines of an incarnation, and the secret by which they know each other."""

    token: str
    registrations: tuple[MachineRegistration, ...]

    def to_text(self) -> str:
        """Return the world as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Read what `to_text` wrote."""
        values = json.loads(text)
        registrations = tuple(
            MachineRegistration.from_values(entry) for entry in values["registrations"]
        )
        return cls(token=values["token"], registrations=registrations)

    @property
    def machines(self) -> tuple[int, ...]:
        """The number of workers of each machine."""
        return tuple(registration.workers for registration in self.registrations)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Each machine's name, for people."""
        return tuple(registration.who.host for registration in self.registrations)


@dataclass(frozen=True, kw_only=True)
class GenerationInfo:
    """What a worker needs to know of the world, beyond its own place."""

    token: str
    machines: tuple[int, ...]
    addresses: tuple[str, ...]
    hosts: tuple[str, ...]

    def to_text(self) -> str:
        """Return the formation as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Read what `to_text` wrote."""
        values: dict[str, Any] = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("machines", "addresses", "hosts")}
        return cls(**(values | lists))
