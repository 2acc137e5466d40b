"""How servers and the workers of a run find each other, through the run's store.

    server                                         rank 0
    find the run's newest start that is alive
    wait until it asks for servers      ◀──────    ask for so many
    register in its space               ──────▶    wait for registrations whose leases advance
    wait for an invitation              ◀──────    invite each: token, buckets, codec, model
    answer: it serves, or why not       ──────▶    wait for the answers
    read the workers' addresses         ◀──────    write them
    connect to all workers

A server may end before it is invited: then another one may take its place. When workers are lost,
the servers wait for the invitation of the next generation, and serve that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from shlex import quote
from urllib.parse import unquote

from torch._C._distributed_c10d import Store

from paceline.cluster.json_record import JsonRecord
from paceline.cluster.membership.leases.heartbeat import Heartbeat
from paceline.cluster.membership.leases.lease import ENDED
from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.rendezvous.deadline import Deadline, PrintedWaits
from paceline.cluster.rendezvous.lease_watch import LeaseWatch, lease_key
from paceline.cluster.rendezvous.process_rendezvous import START
from paceline.cluster.rendezvous.registered_machine import STORE_LIMIT
from paceline.cluster.rendezvous.registration import Registration, RunRecord
from paceline.cluster.stores.failure_report import FAILURE
from paceline.cluster.stores.polled_store import PolledStore
from paceline.cluster.stores.store_spec import STORE_ERRORS, StoreSpec, open_store, peek
from paceline.cluster.stores.waiting import await_keys
from paceline.config.world import without_password
from paceline.errors import CommError, CommTimeout, ConfigError, PeerLost

AVERAGING = "averaging server"
PARAMETERS = "parameter server"
"""Roles of servers: what they merge, or own."""

_WANTED = "server/wanted"
_STARTED = "server/started"
_PAUSE_S = 0.05
_LOOK_S = 0.25  # between two looks at the lease of a server that is to answer


@dataclass(frozen=True, kw_only=True)
class WantedServers(JsonRecord):
    """Servers that a start asks for.

    Attributes:
        role: what they are, such as `AVERAGING`.
    """

    role: str
    count: int

    def name(self, slot: int) -> str:
        """Return what messages call a server, by its place among all."""
        return f"the {self.role}" if self.count == 1 else f"{self.role} {slot + 1} of {self.count}"


@dataclass(frozen=True, kw_only=True)
class InvitedBucket:
    """Bucket of which a server is to sum its shard.

    Attributes:
        lengths: the numbers of values of its parameters.
        dtype: of the values, such as "float32".
        encoded: whether the invitation's codec encodes contributions.
        suppresses_zeros: whether contributions may leave out blocks of zeros.
        returns_parameters: whether updated parameters may return in place of sums.
        slots: number of versions that may be under way at once.
    """

    lengths: tuple[int, ...]
    dtype: str
    encoded: bool
    suppresses_zeros: bool
    returns_parameters: bool
    slots: int


@dataclass(frozen=True, kw_only=True)
class Invitation(JsonRecord):
    """Invitation of a server by the workers of a run.

    Attributes:
        role: what the server is to be, such as `AVERAGING`.
        number: its place among all that serve.
        servers: the names of these.
        version: of Paceline.
        token: with which processes authenticate each other.
        purpose: of the window.
        workers_per_machine: for each machine, its number of workers.
        names: of the workers, in rank order, for errors.
        buckets: what travels.
        optimizer: the class that updates, for the server's output; "": none does.
        asynchronous: each worker has a window of its own; these are the next ones in its order.
        scales_rate: as of `ParameterServer`.
        wire: name of the codec.
        connections: number of TCP connections to each worker.
        model: digest of the names and shapes of the model's parameters.
        size: bytes of the server's window.
        timeout: seconds that the server waits for the next invitation after workers were lost.
    """

    role: str
    number: int
    servers: tuple[str, ...]
    version: str
    token: str = field(repr=False)
    purpose: str
    workers_per_machine: tuple[int, ...]
    names: tuple[str, ...]
    buckets: tuple[InvitedBucket, ...]
    optimizer: str
    asynchronous: bool = False
    scales_rate: bool = False
    wire: str
    connections: int
    model: str
    size: int
    timeout: float


def name_of(registration: Registration, role: str) -> str:
    """Return what errors call a server of a role."""
    process = registration.process
    return f"the {role} on {process.host} (process {process.pid})"


class RegisteredServer:
    """Server's registration in one start of a run; its lease is renewed from construction on.

    Args:
        store: the start's.
    """

    def __init__(self, store: PolledStore, registration: Registration) -> None:
        self._store = store
        self._registration = registration
        self._lease_store = store.clone()  # a wait on one blocks its other users
        self._heartbeat = Heartbeat(self)
        self._slot = 0
        self._invited = False
        self._rests = False

    def register(
        self, run_id: str, deadline: Deadline, is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        """Become one of the start's servers; return whether the start came to ask for any.

        Args:
            deadline: of all waits.
            is_over: tells that the start is over.

        Raises:
            ConfigError: it has all its servers, which are alive; names one.
            DeadlinePassed: it asks for none, or another one's state isn't known in time.
        """
        while (text := peek(self._store, _WANTED)) is None:
            if is_over():
                return False
            deadline.check_and_pause(f"an invitation by the workers of run {run_id!r}")
        wanted = WantedServers.from_text(text)
        occupied = ""
        for slot in range(wanted.count):
            occupied = self._take(slot, wanted.role, deadline)
            if not occupied:
                self._slot = slot
                return True
        has = "a server" if wanted.count == 1 else f"{wanted.count} servers"
        one = "one server" if wanted.count == 1 else f"{wanted.count} servers"
        raise ConfigError(
            f"Run {run_id!r} has {has} already, {occupied}: a run has {one}; stop that one to "
            "replace it before the run begins."
        )

    def _take(self, slot: int, role: str, deadline: Deadline) -> str:
        """Take a place; return the name of a server that has it, and how its life is known."""
        own = self._registration.to_text()
        key = _key_of(slot)
        while (text := self._store.compare_set(key, "", own)) != own.encode():
            other = Registration.from_text(text)
            watch = LeaseWatch(self._store, other, self._registration.process)
            name = name_of(other, role)
            while (verdict := watch.verdict()).state == "unknown":
                deadline.check_and_pause(f"a heartbeat of {name}")
            if verdict.state == "alive":
                return f"{name} ({verdict.reason})"
            self._store.compare_set(key, text.decode(), own)
        return ""

    def invitation(self) -> Invitation | None:
        """Return the invitation, if it has come."""
        text = peek(self._store, self._key("invitation"))
        return None if text is None else Invitation.from_text(text)

    def following(self, invitation: Invitation) -> Invitation | None:
        """Wait for the workers' next invitation: by their next generation, or to other parameters.

        Args:
            invitation: the present one.

        Returns:
            the next one; None where the run has ended, or invites no server in time.
        """
        ends = time.monotonic() + invitation.timeout
        # The store goes with the run: then no generation follows.
        with suppress(CommError, *STORE_ERRORS):
            while time.monotonic() < ends:
                found = self.invitation()
                if found is not None and found.purpose != invitation.purpose:
                    return found
                if peek(self._store, FAILURE) is not None or self._removed:
                    return None
                time.sleep(_PAUSE_S)
        return None

    def answer(self, invitation: Invitation, refusal: str = "") -> None:
        """Answer an invitation: with "", the server serves."""
        self._invited = True
        if self._rests:
            self._heartbeat = Heartbeat(self)
            self._rests = False
        self._store.set(self._key(_answer_to(invitation.purpose)), refusal or "serves")

    def addresses(
        self, invitation: Invitation, purpose: str, number: int, timeout: float
    ) -> list[str]:
        """Return what the workers have gathered for the `number`-th time, for a window.

        Args:
            invitation: the present one.
            purpose: of the window.
            number: from 0.
            timeout: seconds to wait.

        Raises:
            CommTimeout: they didn't in time.
            PeerLost: a process of the run gave a reason for its end; or the workers lost another
                one before they had connected, and their next generation has sent an invitation.
        """
        key = self._key(_shared(purpose, number))
        ends = time.monotonic() + timeout
        while not self._store.check([key]):
            left = ends - time.monotonic()
            try:
                await_keys(
                    self._store,
                    [key],
                    min(_LOOK_S, left),
                    lambda _: f"The workers sent no addresses in {timeout:g} s.",
                )
            except CommTimeout:
                self.require_newest(invitation)
                if left <= _LOOK_S:
                    raise
        texts: list[str] = json.loads(self._store.get(key))
        return texts

    def require_newest(self, invitation: Invitation) -> None:
        """Require that an invitation is the workers' newest.

        Raises:
            PeerLost: the workers lost another one before they had connected, and their next
                generation has sent an invitation.
        """
        newest = None
        with suppress(*STORE_ERRORS):  # without the store, the workers may still connect
            newest = self.invitation()
        if newest is not None and newest.purpose != invitation.purpose:
            raise PeerLost("The workers lost another worker while they connected.")

    def rest(self) -> None:
        """Don't renew the lease until the next answer: the run may end and remove it."""
        self._heartbeat.close()
        self._rests = True

    @property
    def _removed(self) -> bool:
        return peek(self._store, _key_of(self._slot)) is None

    def close(self) -> None:
        """Give up the registration; before an answer, another server may then take its place."""
        self._heartbeat.close()
        if self._invited:  # the run ends with its server, and what it has in the store goes
            return
        with suppress(*STORE_ERRORS):
            self._lease_store.set(lease_key(self._registration), ENDED)

    def beat(self, count: int) -> None:
        """Renew the lease."""
        self._lease_store.set(lease_key(self._registration), str(count))

    def beat_failed(self, error: Exception) -> None:
        """Report nothing: the server's waits find that the store is lost."""

    def _key(self, name: str) -> str:
        return f"server/{self._registration.id}/{name}"


def open_start(store: Store) -> PolledStore:
    """Return a start's store as a server and its workers use it."""
    assert isinstance(store, PolledStore)  # as every store that another process reaches
    return store


def meet_run(
    rendezvous: StoreSpec, registration: Registration, run_id: str, deadline: Deadline
) -> tuple[RegisteredServer, Invitation]:
    """Register as a server of a run's newest start, and wait until it is invited.

    Raises:
        ConfigError: the start has all its servers.
        DeadlinePassed: no run came, or it invited no server.
    """
    while True:
        found = _newest_start(rendezvous, registration.process)
        if found is None:
            deadline.check_and_pause(f"run {run_id!r}")
            continue
        space, is_over = found
        store = open_start(open_store(space, STORE_LIMIT))
        registered = RegisteredServer(store, registration)
        try:
            asked = registered.register(run_id, deadline, is_over)
            if asked and (invitation := await_invitation(registered, run_id, deadline, is_over)):
                return registered, invitation
        except BaseException:
            registered.close()
            raise
        registered.close()


def await_invitation(
    registered: RegisteredServer,
    run_id: str,
    deadline: Deadline,
    is_over: Callable[[], bool] = lambda: False,
) -> Invitation | None:
    """Wait for the invitation; None: the start is over.

    Raises:
        DeadlinePassed: none came.
    """
    while (invitation := registered.invitation()) is None:
        if is_over():
            return None
        deadline.check_and_pause(f"an invitation by the workers of run {run_id!r}")
    return invitation


def _newest_start(
    rendezvous: StoreSpec, own_process: ProcessIdentity
) -> tuple[StoreSpec, Callable[[], bool]] | None:
    """Return the space of a run's newest start, and what tells that the start is over."""
    try:
        store = open_store(rendezvous, STORE_LIMIT)
        text = peek(store, "run")
        launched = peek(store, START)
    except CommError:  # of a store that the run serves: the run is yet to start
        return None
    if text is None:
        if launched is None:
            return None
        space = rendezvous.subspace(launched.decode())
        return space, lambda: peek(store, START) != launched
    record = RunRecord.from_text(text)
    space = rendezvous.subspace(record.generation)
    leader = LeaseWatch(open_store(space, STORE_LIMIT), record.leader, own_process)
    deadline = Deadline(2 * STORE_LIMIT.total_seconds(), "check machine 0")
    while (state := leader.verdict().state) == "unknown":
        deadline.check_and_pause("a heartbeat of the run's machine 0")
    if state == "dead":
        return None
    return space, lambda: peek(store, "run") != text or leader.verdict().state == "dead"


def announce_servers(store: Store, count: int) -> None:
    """Let the workers of a start know how many servers the launcher starts with them.

    Args:
        count: 0: it was asked for none, and could start some.
    """
    store.set(_STARTED, str(count))


def started_servers(store: Store) -> int:
    """Return how many servers were started with the workers of a start; 0: none."""
    return _announced(store) or 0


def _announced(store: Store) -> int | None:
    text = peek(store, _STARTED)
    return None if text is None else int(text)


def await_servers(
    store: PolledStore, own_process: ProcessIdentity, wanted: WantedServers, limit: float
) -> list[Registration]:
    """Ask for servers, and wait until all are alive; print what is awaited; rank 0 calls it.

    Args:
        store: the start's.
        own_process: this process.
        wanted: what the workers need.
        limit: seconds to wait.

    Raises:
        CommError: one didn't come in time; says how to start it.
    """
    store.set(_WANTED, wanted.to_text())
    remedy = f"start it with {serve_command(store)}"
    started = _announced(store)
    if started is not None and wanted.role == PARAMETERS:
        remedy += f", or let paceline launch start it by --num_servers {wanted.count}"
    deadline = Deadline(limit, remedy, waits=PrintedWaits(remedy))
    if (started or 0) >= wanted.count:  # with the workers, at the same time
        deadline = Deadline(limit, "check its output")
    return [
        _await_server(store, own_process, slot, wanted.name(slot), deadline)
        for slot in range(wanted.count)
    ]


def _await_server(
    store: PolledStore, own_process: ProcessIdentity, slot: int, name: str, deadline: Deadline
) -> Registration:
    watch: LeaseWatch | None = None
    while True:
        text = peek(store, _key_of(slot))
        if text is not None:
            registration = Registration.from_text(text)
            if watch is None or watch.registration != registration:
                watch = LeaseWatch(store, registration, own_process)
            if watch.verdict().state == "alive":
                return registration
            deadline.pause()
        if text is None or watch is None or watch.verdict().state == "dead":
            deadline.check_and_pause(name)


def present(
    store: PolledStore, registrations: Sequence[Registration], own_process: ProcessIdentity
) -> list[int]:
    """Return which servers are alive, or not known to have ended; rank 0 does."""
    watches = [LeaseWatch(store, one, own_process) for one in registrations]
    return [number for number, watch in enumerate(watches) if watch.verdict().state != "dead"]


def invite(
    store: PolledStore,
    registrations: Sequence[Registration],
    invitations: Sequence[Invitation],
    own_process: ProcessIdentity,
    limit: float,
) -> None:
    """Invite servers; rank 0 does.

    Args:
        store: the start's.
        registrations: the servers'.
        invitations: what each is to serve.
        own_process: this process.
        limit: seconds to wait for an answer.

    Raises:
        ConfigError: one refuses; says why.
        CommError: one has ended, or didn't answer in time.
        PeerLost: another process gave a reason for the run's end.
    """
    pairs = list(zip(registrations, invitations, strict=True))
    for registration, invitation in pairs:
        store.set(f"server/{registration.id}/invitation", invitation.to_text())
    for registration, invitation in pairs:
        _await_answer(store, registration, invitation, own_process, limit)


def _await_answer(
    store: PolledStore,
    registration: Registration,
    invitation: Invitation,
    own_process: ProcessIdentity,
    limit: float,
) -> None:
    name = invitation.servers[invitation.number]
    answer = f"server/{registration.id}/{_answer_to(invitation.purpose)}"
    watch = LeaseWatch(store, registration, own_process)
    ends = time.monotonic() + limit
    while True:
        left = ends - time.monotonic()
        try:
            await_keys(store, [answer], min(_LOOK_S, left), lambda _: f"{name} didn't answer.")
            break
        except CommTimeout as error:
            if (verdict := watch.verdict()).state == "dead":
                raise CommError(f"{name} has ended: {verdict.reason}.") from error
            # Short waits, with a look at the lease between
            # them: a dead server is found before the limit.
            if left <= _LOOK_S:
                what = f"{name} didn't answer within {limit:g} s: check its output."
                raise CommError(what) from error
    refusal = store.get(answer).decode()
    if refusal != "serves":
        raise ConfigError(f"{name} refuses to serve this run: {refusal}")


def give_addresses(
    store: PolledStore,
    registration: Registration,
    purpose: str,
    number: int,
    texts: Sequence[str],
) -> None:
    """Give a server what the workers have gathered for the `number`-th time; rank 0 does."""
    store.set(f"server/{registration.id}/{_shared(purpose, number)}", json.dumps(list(texts)))


def _key_of(slot: int) -> str:
    return f"server/registration/{slot}"


def _answer_to(purpose: str) -> str:
    return f"answer/{purpose}"


def _shared(purpose: str, number: int) -> str:
    return f"shared/{purpose}/{number}"


def serve_command(store: PolledStore) -> str:
    """Return the command that starts a server of a start in a store; without any password."""
    run_id = unquote(store.space.partition("/")[0].removeprefix("paceline-"))
    address = store.address
    place = f"--master {address}"
    if address.startswith(("http://", "https://")):
        place = f"--etcd {quote(without_password(address).removeprefix('http://'))}"
    elif "://" in address:
        host, _, port = (
            address.rpartition("@")[2].rpartition("://")[2].partition("/")[0].partition(":")
        )
        place = f"--redis_host {host}" + (f" --redis_port {port}" if port else "")
    elif address.startswith("/"):
        place = f"--file_store_path {quote(address)}"
    return f"paceline serve --run_id {quote(run_id)} {place}"
