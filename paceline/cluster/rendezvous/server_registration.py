"""How an averaging server and the workers of a run find each other, through the run's store.

    server                                         rank 0
    find the run's newest start that is alive
    register in its space                          wait for a registration whose lease advances
    wait for an invitation              ◀──────    invite it: token, buckets, codec, model
    answer: it serves, or why not       ──────▶    wait for the answer
    read the workers' addresses         ◀──────    write them
    connect to all workers

A start has one server. It may end before it is invited: then another one may take its place. When
workers are lost, the server waits for the invitation of the next generation, and serves that.
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
from paceline.cluster.rendezvous.deadline import Deadline, no_report
from paceline.cluster.rendezvous.lease_watch import LeaseWatch, lease_key
from paceline.cluster.rendezvous.process_rendezvous import START
from paceline.cluster.rendezvous.registered_machine import STORE_LIMIT
from paceline.cluster.rendezvous.registration import Registration, RunRecord
from paceline.cluster.stores.failure_report import FAILURE
from paceline.cluster.stores.polled_store import PolledStore
from paceline.cluster.stores.store_spec import STORE_ERRORS, StoreSpec, open_store, peek
from paceline.cluster.stores.waiting import await_keys
from paceline.config.world import without_password
from paceline.errors import CommError, CommTimeout, ConfigError

_KEY = "server/registration"
_PAUSE_S = 0.05
_LOOK_S = 0.25  # between two looks at the lease of a server that is to answer


@dataclass(frozen=True, kw_only=True)
class InvitedBucket:
    """Bucket that a server is to sum.

    Attributes:
        numel: its number of values.
        dtype: of the values, such as "float32".
        encoded: whether the invitation's codec encodes contributions.
        suppresses_zeros: whether contributions may leave out blocks of zeros.
    """

    numel: int
    dtype: str
    encoded: bool
    suppresses_zeros: bool


@dataclass(frozen=True, kw_only=True)
class Invitation(JsonRecord):
    """Invitation of a server by the workers of a run.

    Attributes:
        version: of Paceline.
        token: with which processes authenticate each other.
        purpose: of the window.
        workers_per_machine: for each machine, its number of workers.
        names: of the workers, in rank order, for errors.
        buckets: what travels.
        wire: name of the codec.
        connections: number of TCP connections to each worker.
        model: digest of the names and shapes of the model's parameters.
        size: bytes of the server's window.
        timeout: seconds that the server waits for the next invitation after workers were lost.
    """

    version: str
    token: str = field(repr=False)
    purpose: str
    workers_per_machine: tuple[int, ...]
    names: tuple[str, ...]
    buckets: tuple[InvitedBucket, ...]
    wire: str
    connections: int
    model: str
    size: int
    timeout: float


def name_of(registration: Registration) -> str:
    """Return what errors call a server."""
    process = registration.process
    return f"the averaging server on {process.host} (process {process.pid})"


class RegisteredServer:
    """Server's registration in one start of a run; its lease is renewed from construction on.

    Args:
        store: the start's.
        registration: the server's.
    """

    def __init__(self, store: PolledStore, registration: Registration) -> None:
        self._store = store
        self._registration = registration
        self._lease_store = store.clone()  # a wait on one blocks its other users
        self._heartbeat = Heartbeat(self._beat, no_report)
        self._invited = False

    def register(self, run_id: str, deadline: Deadline) -> None:
        """Become the start's server.

        Raises:
            ConfigError: it has one that is alive; names it.
            DeadlinePassed: the other one's state isn't known in time.
        """
        own = self._registration.to_text()
        while (text := self._store.compare_set(_KEY, "", own)) != own.encode():
            other = Registration.from_text(text)
            watch = LeaseWatch(self._store, other, self._registration.process)
            while (verdict := watch.verdict()).state == "unknown":
                deadline.check_and_pause(f"a heartbeat of {name_of(other)}")
            if verdict.state == "alive":
                raise ConfigError(
                    f"Run {run_id!r} has a server already, {name_of(other)} ({verdict.reason}): a "
                    "run has one server; stop that one to replace it before the run begins."
                )
            self._store.compare_set(_KEY, text.decode(), own)

    def invitation(self) -> Invitation | None:
        """Return the invitation, if it has come."""
        text = peek(self._store, self._key("invitation"))
        return None if text is None else Invitation.from_text(text)

    def following(self, invitation: Invitation) -> Invitation | None:
        """Wait for the invitation by the workers' next generation, after workers were lost.

        Args:
            invitation: of the present one.

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
                if peek(self._store, FAILURE) is not None or peek(self._store, _KEY) is None:
                    return None
                time.sleep(_PAUSE_S)
        return None

    def answer(self, invitation: Invitation, refusal: str = "") -> None:
        """Answer an invitation: with "", the server serves."""
        self._invited = True
        self._store.set(self._key(_answer_to(invitation.purpose)), refusal or "serves")

    def addresses(self, purpose: str, number: int, timeout: float) -> list[str]:
        """Return what the workers have gathered for the `number`-th time, for a window.

        Raises:
            CommTimeout: they didn't in time.
            PeerLost: a process of the run gave a reason for its end.
        """
        key = self._key(_shared(purpose, number))
        await_keys(
            self._store,
            [key],
            timeout,
            lambda _: f"The workers sent no addresses in {timeout:g} s.",
        )
        texts: list[str] = json.loads(self._store.get(key))
        return texts

    def close(self) -> None:
        """Give up the registration; before an answer, another server may then take its place."""
        self._heartbeat.close()
        if self._invited:  # the run ends with its server, and what it has in the store goes
            return
        with suppress(*STORE_ERRORS):
            self._lease_store.set(lease_key(self._registration), ENDED)

    def _beat(self, count: int) -> None:
        self._lease_store.set(lease_key(self._registration), str(count))

    def _key(self, name: str) -> str:
        return f"server/{self._registration.id}/{name}"


def open_start(store: Store) -> PolledStore:
    """Return a start's store as a server and its workers use it.

    Raises:
        ConfigError: no other process can reach it.
    """
    if isinstance(store, PolledStore):
        return store
    raise ConfigError(
        "averaging through a server needs a run that a server can find, but this process was "
        "started alone: start it with paceline launch or another launcher, one worker is enough."
    )


def meet_run(
    rendezvous: StoreSpec, registration: Registration, run_id: str, deadline: Deadline
) -> tuple[RegisteredServer, Invitation]:
    """Register as the server of a run's newest start, and wait until it is invited.

    Raises:
        ConfigError: the start has another server.
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
            registered.register(run_id, deadline)
            if invitation := await_invitation(registered, run_id, deadline, is_over):
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
    deadline = Deadline(2 * STORE_LIMIT.total_seconds(), no_report, time.sleep, "check machine 0")
    while (state := leader.verdict().state) == "unknown":
        deadline.check_and_pause("a heartbeat of the run's machine 0")
    if state == "dead":
        return None
    return space, lambda: peek(store, "run") != text or leader.verdict().state == "dead"


def await_server(
    store: PolledStore, own_process: ProcessIdentity, limit: float, report: Callable[[str], None]
) -> Registration:
    """Wait for a server that is alive; rank 0 does.

    Args:
        store: the start's.
        own_process: this process.
        limit: seconds.
        report: receives a line if there is none yet.

    Raises:
        CommError: none came in time; says how to start one.
    """
    remedy = f"start it with {serve_command(store)}"
    deadline = Deadline(limit, lambda line: report(f"{line}: {remedy}."), time.sleep, remedy)
    watch: LeaseWatch | None = None
    while True:
        text = peek(store, _KEY)
        if text is not None:
            registration = Registration.from_text(text)
            if watch is None or watch.registration != registration:
                watch = LeaseWatch(store, registration, own_process)
            if watch.verdict().state == "alive":
                return registration
            deadline.pause()
        if text is None or watch is None or watch.verdict().state == "dead":
            deadline.check_and_pause("the averaging server")


def invite(
    store: PolledStore,
    registration: Registration,
    invitation: Invitation,
    own_process: ProcessIdentity,
    limit: float,
) -> None:
    """Invite a server; rank 0 does.

    Args:
        store: the start's.
        registration: the server's.
        invitation: what it is to serve.
        own_process: this process.
        limit: seconds to wait for the answer.

    Raises:
        ConfigError: it refuses; says why.
        CommError: it has ended, or didn't answer in time.
        PeerLost: another process gave a reason for the run's end.
    """
    prefix = f"server/{registration.id}"
    name = name_of(registration)
    answer = f"{prefix}/{_answer_to(invitation.purpose)}"
    store.set(f"{prefix}/invitation", invitation.to_text())
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
