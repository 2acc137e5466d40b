"""The processes of a launcher's world as they arrive, and which rank each of them gets.

Our ranks are counted machine by machine; a launcher's may go round the machines:

    the launcher's rank      0    1    2    3        machine 0: a    machine 1: b
    on node                  a    b    a    b   ->   ranks 0, 1      ranks 2, 3
    local rank               0    0    1    1        its 0, 2        its 1, 3

Machines are numbered as the launcher numbers them. Where it doesn't (mpirun), they are numbered by
the first rank on each, and known by their network: where 127.0.0.1 is the same place.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ProcessRegistration:
    """One process's entry in the store.

    Attributes:
        id: a random name of this entry.
        rank: the launcher's number of the process.
        node: the launcher's number of its machine, if it has one.
        local_rank: the process's number on its machine.
        who: the process.
        addresses: where peers may try to reach its machine, the preferred ones first.
        port: where it listens while they do.
    """

    id: str
    rank: int
    node: int | None
    local_rank: int
    who: ProcessIdentity
    addresses: tuple[str, ...]
    port: int

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """Read what `dataclasses.asdict` made."""
        who, addresses = ProcessIdentity(**values["who"]), tuple(values["addresses"])
        return cls(**(values | {"who": who, "addresses": addresses}))

    def to_text(self) -> str:
        """Return the entry as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Read what `to_text` wrote."""
        return cls.from_values(json.loads(text))


@dataclass(frozen=True, kw_only=True)
class RegisteredProcesses:
    """All processes of a start, and the secret by which they know each other.

    Attributes:
        token: the job token.
        registrations: the entries, by the launcher's rank.
        lost: why the start failed, if it did: some processes did not come.
    """

    token: str
    registrations: tuple[ProcessRegistration, ...]
    lost: str = ""

    def to_text(self) -> str:
        """Return the company as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Read what `to_text` wrote."""
        values = json.loads(text)
        registrations = tuple(
            ProcessRegistration.from_values(entry) for entry in values["registrations"]
        )
        return cls(**(values | {"registrations": registrations}))

    def machines(self) -> tuple[tuple[ProcessRegistration, ...], ...]:
        """Return the processes of each machine, by their local ranks.

        Raises:
            ConfigError: the launcher's numbers contradict each other.
        """
        groups: dict[object, list[ProcessRegistration]] = {}
        seen: Counter[object] = Counter()
        for registration in self.registrations:
            # mpirun may be given one machine under two names: each then has a local rank 0.
            seen[registration.who.network, registration.local_rank] += 1
            count = seen[registration.who.network, registration.local_rank]
            key = (
                (registration.who.network, count)
                if registration.node is None
                else registration.node
            )
            groups.setdefault(key, []).append(registration)
        if self.registrations[0].node is not None:
            groups = dict(sorted(groups.items(), key=lambda item: item[1][0].node or 0))
        return tuple(_in_order(group) for group in groups.values())


def _in_order(group: Sequence[ProcessRegistration]) -> tuple[ProcessRegistration, ...]:
    ordered = sorted(group, key=lambda registration: registration.local_rank)
    if [registration.local_rank for registration in ordered] != list(range(len(ordered))):
        local = ", ".join(str(registration.local_rank) for registration in ordered)
        raise ConfigError(
            f"The processes on {ordered[0].who.host} have the local ranks {local} by the "
            f"launcher's variables, and must have 0 to {len(ordered) - 1}: see what set them."
        )
    return tuple(ordered)
