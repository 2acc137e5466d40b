"""The keys of a rendezvous in the store, and the records in them as JSON.

`<i>` is a machine's number, or a rank.

Machines with supervisors write these. In the run's space:

    run                 the newest start of the run                             RunRecord
    beat                keeps `run` from expiring                               a counter

In the start's own space, which is named by its id:

    machine/<i>         the registration of machine i                           Registration
    lease/<id>          the lease of the machine with that registration         a counter
    world               all registrations, written by machine 0                 RegisteredWorld
    reach/<i>           the addresses at which machine i reached each of the others
    judged/<i>          machine i has read all `reach` entries
    formed/<i>          the world that the workers of machine i join            Generation
    failure             why the run ended; the first report is the run's        FailureReport
    finished            machine 0 has marked the run as finished
    left/<i>            machine i has deregistered: it has ended and stopped its lease
    remover             the id of the machine that removes all this

Processes of a launcher have no supervisor, and write these. In the job's space:

    start               the id of the newest start, written by rank 0

In the start's own space, besides `world`, `failure`, `reach/<i>` and `judged/<i>` as above:

    registration/<i>    the registration of the launcher's rank i               Registration
    read/<i>            rank i has read the world
    checked/<i>         the first process of machine i has checked the configuration
    opened/<i>          the first process of machine i has opened the run folder
    reported/<i>/<digest>  which rank of machine i prints the failure with this digest
    left/<i>            rank i has deregistered: it has ended

Ranks write these into the space of a start, whatever started them; <g> is `Generation.key_prefix`:

    joins/<machine>/<i>                                  how often a supervised worker has joined
    preflight/job token/facts/<i>, .../digest/<i>        what rank i compares with rank 0
    <g>/preflight/<subject>/facts/<i>, .../digest/<i>    of every other subject
    from rank 0/<name>                                   a value that rank 0 shares
    <g>/<purpose>/...                                    torch's rendezvous of a process group
    <g>/ended/<i>                                        rank i closed its world after so many steps
    <g>/last/<i>, .../posted                             its checksums then; how many have posted

Servers (`server_registration.py`) and rank 0 write these, in the start's own space:

    server/wanted                the role and the number of the servers         WantedServers
    server/started               how many a supervisor started with the workers
    server/registration/<k>      the registration of a server                   Registration
    lease/<id>                   its lease
    server/<id>/invitation       what rank 0 invites it to serve                Invitation
    server/<id>/answer           "serves", or why it refuses
    server/<id>/shared/<k>       the addresses of the workers, of their k-th connections

Ranks are counted machine by machine; a launcher's may go round the machines:

    the launcher's rank      0    1    2    3        machine 0: a    machine 1: b
    on node                  a    b    a    b   ->   ranks 0, 1      ranks 2, 3
    local rank               0    0    1    1        its 0, 2        its 1, 3

Machines are numbered as the launcher numbers them. Where it doesn't (mpirun), they are numbered by
the first rank on each. Two processes are on one machine if their 127.0.0.1 is the same.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.cluster.json_record import JsonRecord
from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Registration(JsonRecord):
    """Registration of one machine (made by its supervisor) or of one process of a launcher.

    Attributes:
        id: a random identifier of this registration.
        process: the identity of the supervisor, or of the process that the launcher started.
        workers: the number of workers on the machine; 1 for a process of a launcher.
        rank: for a process of a launcher, the rank that the launcher gave it; for a machine, the
            machine's number.
        node: the launcher's number for the process's machine, if the launcher gives one.
        local_rank: the process's local rank.
        addresses: addresses at which peers may try to reach the machine, in order of preference.
        port: the port on which the machine listens while peers probe its addresses.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: ProcessIdentity
    workers: int = 1
    rank: int = 0
    node: int | None = None
    local_rank: int = 0
    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True, kw_only=True)
class RunRecord(JsonRecord):
    """Record of a run's newest start, which the next start reads, perhaps from a shared folder.

    Attributes:
        generation: the start's id.
        leader: machine 0's registration.
    """

    generation: str
    machines: int
    leader: Registration


@dataclass(frozen=True, kw_only=True)
class RegisteredWorld(JsonRecord):
    """Registered world: all registrations of a start, and the job token.

    Attributes:
        token: the job token, with which the processes authenticate each other.
        registrations: the registrations: machines in the order of their numbers, or processes in
            the order of their launcher's ranks.
        lost: the error message of a start that failed because some processes didn't register; "" if
            all registered.
    """

    token: str
    registrations: tuple[Registration, ...]
    lost: str = ""

    @property
    def one_network(self) -> bool:
        """Whether all are on one machine, where 127.0.0.1 reaches every other."""
        return len({entry.process.network for entry in self.registrations}) == 1

    def processes_by_machine(self) -> tuple[tuple[Registration, ...], ...]:
        """Return the launcher's processes on each machine, in the order of their local ranks.

        Raises:
            ConfigError: the launcher's numbers contradict each other.
        """
        groups: dict[object, list[Registration]] = {}
        seen: Counter[object] = Counter()
        for entry in self.registrations:
            # mpirun may be given one machine under two names: each then has a local rank 0.
            seen[entry.process.network, entry.local_rank] += 1
            count = seen[entry.process.network, entry.local_rank]
            key = (entry.process.network, count) if entry.node is None else entry.node
            groups.setdefault(key, []).append(entry)
        if self.registrations[0].node is not None:
            # The launcher's own numbers of machines, so that messages agree with its output.
            groups = dict(sorted(groups.items(), key=lambda item: item[1][0].node or 0))
        return tuple(_in_order(group) for group in groups.values())


def _in_order(group: Sequence[Registration]) -> tuple[Registration, ...]:
    ordered = sorted(group, key=lambda entry: entry.local_rank)
    if [entry.local_rank for entry in ordered] != list(range(len(ordered))):
        local = ", ".join(str(entry.local_rank) for entry in ordered)
        raise ConfigError(
            f"The launcher's variables give the processes on {ordered[0].process.host} the local "
            f"ranks {local}, but they must be 0 to {len(ordered) - 1}: check where these variables "
            "are set."
        )
    return tuple(ordered)
