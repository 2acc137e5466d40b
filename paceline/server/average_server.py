"""Client of an averaging server: finds it, invites it, and makes the link for its window."""

from __future__ import annotations

import hashlib
import socket
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count

from torch import nn

from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.rendezvous.preflight import model_facts
from paceline.cluster.rendezvous.registration import Registration
from paceline.cluster.rendezvous.server_registration import (
    Invitation,
    InvitedBucket,
    await_server,
    give_addresses,
    invite,
    name_of,
    open_start,
)
from paceline.cluster.stores.polled_store import PolledStore
from paceline.cluster.stores.store_spec import STORE_ERRORS
from paceline.cluster.supervision.supervisor import print_message
from paceline.comm.communicator import gather_bytes
from paceline.config.world import SyncConfig
from paceline.errors import CommError, ConfigError, Message, ServerLost
from paceline.generation.context import GenerationContext, ServerLink
from paceline.generation.run import Run
from paceline.reduce.put_engine.layout import Layout
from paceline.update.outer.average import Average
from paceline.version import VERSION

MERGES = "merges"  # purpose of the window
_SOONER = 0.9  # of the limit of a wait: rank 0's error must be the first
_CONNECT_S = 3.0


@dataclass(frozen=True, kw_only=True)
class MetServer:
    """Server that the workers have found.

    Attributes:
        registration: the server's.
        store: of the run's start.
        address: the address of this machine at which the server and the workers reach it.
        model: digest of the model.
        config: how the changes of weights travel.
        token: of the generation that has found the server.
    """

    registration: Registration
    store: PolledStore
    address: str
    model: str
    config: SyncConfig
    token: str

    @property
    def name(self) -> str:
        """What errors call the server."""
        return name_of(self.registration)

    def link(self, context: GenerationContext) -> ServerLink:
        """Return the link to the server, for the window of a generation."""
        numbers = count()  # of local sockets, and of connections
        purpose = context.next_window(MERGES)
        return ServerLink(
            address=self.address,
            publish=lambda texts: give_addresses(
                self.store, self.registration, purpose, next(numbers), texts
            ),
        )

    def invite(self, context: GenerationContext, layout: Layout) -> None:
        """Invite the server to serve a generation; collective, rank 0 does.

        Raises:
            ConfigError: it refuses to serve the run.
            CommError: it doesn't answer at the start; or a peer was lost, or silent.
            ServerLost: a later generation can't be served.
        """
        lost = ""
        if context.world.rank == 0:
            try:
                self._invite(context, layout)
            except STORE_ERRORS as error:
                if context.world.generation.token == self.token:
                    raise
                lost = str(error)
        what = "the answer of the averaging server"
        (text, *_) = gather_bytes(context.group("all", "steps"), lost.encode(), what)
        if text:
            reason = text.decode().removeprefix(f"{self.name} ").rstrip(".")
            raise ServerLost(
                f"the run has lost {self.name}, and ends without it ({reason}). Start the same "
                "command again."
            )

    def _invite(self, context: GenerationContext, layout: Layout) -> None:
        generation = context.world.generation
        specs = [bucket.spec for bucket in layout.buckets]
        invitation = Invitation(
            version=VERSION,
            token=generation.token,
            purpose=context.next_window(MERGES),
            workers_per_machine=generation.workers_per_machine,
            names=tuple(generation.describe(rank) for rank in range(generation.world_size)),
            buckets=tuple(
                InvitedBucket(
                    numel=sum(spec.lengths),
                    dtype=str(spec.dtype).removeprefix("torch."),
                    encoded=spec.codec is not None,
                    suppresses_zeros=spec.suppresses_zeros,
                )
                for spec in specs
            ),
            wire=self.config.wire,
            connections=self.config.connections or 1,
            model=self.model,
            size=layout.server_size,
            timeout=context.limits[1],
        )
        own = ProcessIdentity.of_this_process()
        limit = _SOONER * context.limits[0]
        invite(self.store, self.registration, invitation, own, limit)


def meet_server(run: Run, model: nn.Module, config: SyncConfig, average: Average) -> MetServer:
    """Find the run's averaging server; collective.

    Raises:
        ConfigError: the run can't have one.
        CommError: none came in time.
    """
    refuse_server(config, average)
    context = run.context
    group = context.world
    own = ProcessIdentity.of_this_process()
    store = open_start(run.store) if run.store is not None else None
    if store is None:
        raise ConfigError("this run has no store in which a server could register.")
    text = ""
    if group.rank == 0:
        text = await_server(store, own, _SOONER * context.limits[0], print_message).to_text()
    what = "the wait for the averaging server"
    registration = Registration.from_text(
        gather_bytes(context.group("all", "steps"), text.encode(), what)[0]
    )
    return MetServer(
        registration=registration,
        store=store,
        address=_address(group.address, registration, own),
        model=digest_of(model),
        config=config,
        token=group.generation.token,
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


def _address(address: str, server: Registration, own: ProcessIdentity) -> str:
    """Return this machine's address that a server reaches.

    The address of a run on one machine is 127.0.0.1. A server elsewhere reaches the machine at the
    address from which the machine reaches the server.

    Raises:
        CommError: the server can't be reached.
    """
    if not address.startswith("127.") or server.process.network == own.network:
        return address
    for there in server.addresses:
        with (
            suppress(OSError),
            socket.create_connection((there, server.port), timeout=_CONNECT_S) as connection,
        ):
            found: str = connection.getsockname()[0]
            return found
    raise CommError(
        f"{name_of(server)} can't be reached at any of its addresses "
        f"({', '.join(server.addresses)}): check firewalls, or use --distributed_interfaces there."
    )
