"""Servers as their workers see them: finds and invites them, and links them to a window."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

from torch import nn
from torch.optim import Optimizer

from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.rendezvous.preflight import model_facts
from paceline.cluster.rendezvous.registration import Registration
from paceline.cluster.rendezvous.server_registration import (
    AVERAGING,
    PARAMETERS,
    Invitation,
    InvitedBucket,
    WantedServers,
    await_servers,
    give_addresses,
    invite,
    name_of,
    present,
)
from paceline.cluster.stores.polled_store import PolledStore
from paceline.cluster.stores.store_spec import STORE_ERRORS
from paceline.comm.communicator import gather_bytes
from paceline.config.world import SyncConfig
from paceline.errors import CommError, ConfigError, Message, ServerLost
from paceline.generation.context import GenerationContext
from paceline.generation.run import Run
from paceline.reduce.put_engine.layout import BucketSpec, Layout
from paceline.update.outer.average import Average
from paceline.version import VERSION

_SOONER = 0.9  # of the limit of a wait: rank 0's error must be the first
_CONNECT_S = 3.0


@dataclass(frozen=True, kw_only=True)
class FoundServers:
    """Servers that the workers have found.

    Attributes:
        role: of all of them: parameter servers, or an averaging server.
        registrations: the servers' registrations; none where all were lost.
        store: of the run's start.
        address: the address of this machine at which the servers and the workers reach it.
        model: digest of the model.
        optimizer: the class of the optimizer by which they update; "": they don't.
        config: how values travel.
        token: of the generation that has found them.
    """

    role: str
    registrations: tuple[Registration, ...]
    store: PolledStore
    address: str
    model: str
    optimizer: str
    config: SyncConfig
    token: str

    @property
    def names(self) -> tuple[str, ...]:
        """What errors call the servers."""
        return tuple(name_of(one, self.role) for one in self.registrations)

    def link(
        self, context: GenerationContext, purpose: str, worker: int | None = None
    ) -> ServersLink:
        """Return the link to the servers, for a generation's next window for a purpose.

        Args:
            worker: rank of the only worker of this window, where workers are asynchronous: then
                worker 0's link alone invites, for all. None: all workers share the window.
        """
        return ServersLink(self, context, purpose, invites=not worker)

    def remaining(self, context: GenerationContext) -> FoundServers:
        """Return the servers that a generation can invite; collective.

        Raises:
            CommError: a peer was lost, or silent.
        """
        if context.world.generation.token == self.token:
            return self
        own = ProcessIdentity.of_this_process()
        numbers: list[int] = []
        if context.world.rank == 0:
            with suppress(*STORE_ERRORS):  # without the store no server can be invited
                numbers = present(self.store, self.registrations, own)
        what = "the look at the servers' leases"
        data = gather_bytes(context.group("all", "steps"), json.dumps(numbers).encode(), what)[0]
        left = tuple(self.registrations[number] for number in json.loads(data))
        return replace(self, registrations=left)

    def invite(self, context: GenerationContext, purpose: str, layout: Layout | None) -> None:
        """Invite the servers to serve a generation; collective, rank 0 does.

        Args:
            context: the generation's.
            purpose: of the window.
            layout: of the window; rank 0 needs it.

        Raises:
            ConfigError: one refuses to serve the run.
            CommError: one doesn't answer; or a peer was lost, or silent.
            ServerLost: the averaging server doesn't answer a later generation.
        """
        lost = ""
        if context.world.rank == 0:
            assert layout is not None
            try:
                self._invite(context, purpose, layout)
            except STORE_ERRORS as error:
                if context.world.generation.token == self.token:
                    raise
                lost = str(error)
        what = f"the answer of the {self.role}"
        (text, *_) = gather_bytes(context.group("all", "steps"), lost.encode(), what)
        if text and self.role == AVERAGING:
            raise ServerLost(text.decode())
        if text:  # the next generation looks again which servers are left
            raise CommError(text.decode())

    def _invite(self, context: GenerationContext, purpose: str, layout: Layout) -> None:
        generation = context.world.generation
        first = Invitation(
            role=self.role,
            number=0,
            servers=self.names,
            version=VERSION,
            token=generation.token,
            purpose=context.next_window(purpose),
            workers_per_machine=generation.workers_per_machine,
            names=tuple(generation.describe(rank) for rank in range(generation.world_size)),
            buckets=tuple(_invited(bucket.spec) for bucket in layout.buckets),
            optimizer=self.optimizer,
            asynchronous=self.config.versions_behind is None,
            scales_rate=self.config.staleness_lr == "scale",
            wire=self.config.wire,
            connections=self.config.connections or 1,
            model=self.model,
            size=layout.server_size,
            timeout=context.limits[1],
        )
        invitations = [replace(first, number=n) for n in range(len(self.registrations))]
        own = ProcessIdentity.of_this_process()
        invite(self.store, self.registrations, invitations, own, _SOONER * context.limits[0])


def _invited(spec: BucketSpec) -> InvitedBucket:
    return InvitedBucket(
        lengths=spec.lengths,
        dtype=str(spec.dtype).removeprefix("torch."),
        encoded=spec.codec is not None,
        suppresses_zeros=spec.suppresses_zeros,
        returns_parameters=spec.returns_parameters,
        slots=spec.slots,
    )


class ServersLink:
    """Link to servers, which are the last ranks of the next window for a purpose of a generation.

    Args:
        found: the servers.
        context: the generation's.
        purpose: of the window.
        invites: whether this link invites the servers; otherwise another one has.

    Attributes:
        address: the address of this machine at which the servers and the workers reach it.
        count: the number of servers.
    """

    def __init__(
        self, found: FoundServers, context: GenerationContext, purpose: str, *, invites: bool = True
    ) -> None:
        self.address = found.address
        self.count = len(found.registrations)
        self._found = found
        self._context = context
        self._purpose = purpose
        self._window = context.next_window(purpose)
        self._invites = invites
        self._published = 0  # addresses of local sockets, and then of each connection

    def invite(self, layout: Layout | None) -> None:
        """Invite the servers to open their windows; as `FoundServers.invite`."""
        if self._invites:
            self._found.invite(self._context, self._purpose, layout)

    def publish(self, addresses: Sequence[str]) -> None:
        """Give the servers the addresses that the workers have gathered."""
        number = self._published
        self._published += 1
        for registration in self._found.registrations:
            give_addresses(self._found.store, registration, self._window, number, addresses)


def find_averaging_server(
    run: Run, model: nn.Module, config: SyncConfig, average: Average
) -> FoundServers:
    """Find the run's averaging server; collective.

    Raises:
        ConfigError: the run can't have one.
        CommError: none came in time.
    """
    refuse_server(config, average)
    return _find(run, model, config, WantedServers(role=AVERAGING, count=1))


def find_parameter_servers(
    run: Run, model: nn.Module, optimizer: Optimizer, config: SyncConfig
) -> FoundServers:
    """Find the run's parameter servers; collective.

    Raises:
        ConfigError: the run can't have any.
        CommError: one didn't come in time.
    """
    wanted = WantedServers(role=PARAMETERS, count=config.num_servers)
    return _find(run, model, config, wanted, type(optimizer).__name__)


def _find(
    run: Run, model: nn.Module, config: SyncConfig, wanted: WantedServers, optimizer: str = ""
) -> FoundServers:
    context = run.context
    group = context.world
    own = ProcessIdentity.of_this_process()
    store = run.store
    if not isinstance(store, PolledStore):
        raise _started_alone(wanted)
    texts: list[str] = []
    if group.rank == 0:
        found = await_servers(store, own, wanted, _SOONER * context.limits[0])
        texts = [registration.to_text() for registration in found]
    what = f"the wait for the {wanted.role}"
    data = gather_bytes(context.group("all", "steps"), json.dumps(texts).encode(), what)[0]
    registrations = tuple(Registration.from_text(text) for text in json.loads(data))
    return FoundServers(
        role=wanted.role,
        registrations=registrations,
        store=store,
        address=_address(group.address, registrations, wanted.role, own),
        model=digest_of(model),
        optimizer=optimizer,
        config=config,
        token=group.generation.token,
    )


def _started_alone(wanted: WantedServers) -> ConfigError:
    """Return the error of a process whose store no other process reaches."""
    launch = "paceline launch -n 1"
    flag = "average_through"
    if wanted.role == PARAMETERS:
        launch += f" --num_servers {wanted.count}"
        flag = "sync"
    return ConfigError(
        flag=flag,
        value="server",
        rule=f"this process was started alone, so that no {wanted.role} can find it",
        remedy=f"start the script with {launch} -- python SCRIPT, or with another launcher",
    )


def refuse_server(config: SyncConfig, average: Average) -> None:
    """Refuse a server where there can't be one.

    Raises:
        ConfigError: puts don't go by TCP.
    """
    if average.through == "server" and config.transport != "tcp":
        raise ConfigError(
            flag="average_through",
            value="server",
            rule=Message(f"the server exchanges by TCP, not by {{--transport}} {config.transport}"),
            remedy=Message("leave out {--transport}, or average through the workers"),
        )


def digest_of(model: nn.Module) -> str:
    """Return eight hex digits for the names, shapes and types of a model's tensors."""
    facts = model_facts(chain(model.named_parameters(), model.named_buffers()))
    return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:8]


def _address(address: str, servers: Sequence[Registration], role: str, own: ProcessIdentity) -> str:
    """Return this machine's address that the servers reach.

    The address of a run on one machine is 127.0.0.1. A server elsewhere reaches the machine at the
    address from which the machine reaches the server.

    Raises:
        CommError: a server can't be reached.
    """
    elsewhere = [server for server in servers if server.process.network != own.network]
    if not address.startswith("127.") or not elsewhere:
        return address
    server = elsewhere[0]
    for there in server.addresses:
        with (
            suppress(OSError),
            socket.create_connection((there, server.port), timeout=_CONNECT_S) as connection,
        ):
            found: str = connection.getsockname()[0]
            return found
    raise CommError(
        f"{name_of(server, role)} can't be reached at any of its addresses "
        f"({', '.join(server.addresses)}): check firewalls, or use --distributed_interfaces there."
    )
