"""A server: opens the window to which the workers invite it, and serves to their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Protocol

import torch

from paceline.algorithms.served.asynchronous_servers import AsynchronousServers
from paceline.algorithms.served.parameter_server import ParameterServer
from paceline.cluster.rendezvous.server_registration import (
    AVERAGING,
    PARAMETERS,
    Invitation,
    RegisteredServer,
)
from paceline.codecs.merge_codecs import merge_codec
from paceline.comm.connection_window import connect_window
from paceline.comm.peer_activities import Timeout
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.comm.window import Window
from paceline.errors import CommError, ConfigError, PeerLost, many
from paceline.reduce.put_engine.layout import BucketSpec, Layout, Topology, lay_out
from paceline.reduce.put_engine.shard_server import ShardServer
from paceline.update.owned_shards import OwnedShards
from paceline.version import VERSION

_REPORT_S = 60.0
_SILENCE_S = 60.0
_DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "complex128": torch.complex128,
    "complex64": torch.complex64,
}


class Serving(Protocol):
    """Protocol of what serves the workers of one generation."""

    @property
    def versions(self) -> list[int]:
        """For each bucket, the number of its versions that have returned."""

    @property
    def nbytes(self) -> int:
        """The bytes of all buckets."""

    def serve(self, check: Callable[[], None]) -> None:
        """Return once all workers have announced their end; `check` is called now and then.

        Raises:
            PeerLost: a worker's connection ended before.
            CommError: a worker sent what doesn't belong to the run.
        """

    def release(self) -> None:
        """Let the workers end, which wait for it."""

    def close(self) -> None:
        """End the thread, and the window."""


def refusal(invitation: Invitation, model: str = "") -> str:
    """Return why a server doesn't serve the workers that invite it; "": it does.

    Args:
        invitation: theirs.
        model: digest of the only model that is served; "": any.
    """
    own = VERSION
    if invitation.version != own:
        return (
            f"it is of version {own} of Paceline, and the workers are of {invitation.version}; "
            "install the same version on all machines."
        )
    if model and invitation.model != model:
        return (
            f"it was started with --model {model}, but the run trains model {invitation.model}; "
            "start the server of this run with that digest, or without --model."
        )
    return ""


class WorkersAddresses:
    """Addresses of the workers of an invitation, as a server's bootstrap asks for them.

    Args:
        registered: the server's registration.
        invitation: the present one.
        window: the purpose of the window.
        limit: seconds to wait for them.
    """

    def __init__(
        self, registered: RegisteredServer, invitation: Invitation, window: str, limit: float
    ) -> None:
        self._registered = registered
        self._invitation = invitation
        self._window = window
        self._limit = limit
        self._received: dict[str, Sequence[str]] = {}  # of the workers, by purpose

    def publish(self, purpose: str, rank: int, where: str) -> None:
        """Wait for the addresses that the workers have gathered for a purpose.

        The server publishes none: no worker connects to it.

        Raises:
            CommError: they didn't come in time, or a process of the run reported why it ended.
        """
        number = len(self._received)
        self._received[purpose] = self._registered.addresses(
            self._invitation, self._window, number, self._limit
        )

    def find(self, purpose: str, rank: int) -> str:
        """Return a worker's address."""
        return self._received[purpose][rank]

    def check(self) -> None:
        """Return if the workers still wait for this server; raises as `require_newest`."""
        self._registered.require_newest(self._invitation)


def serve(
    registered: RegisteredServer,
    invitation: Invitation,
    *,
    limit: float,
    report: Callable[[str], None],
) -> None:
    """Serve the workers of an invitation until they have ended.

    Args:
        registered: the server's registration.
        invitation: has been answered.
        limit: seconds to wait until all workers have connected.
        report: receives lines about what is served.

    Raises:
        PeerLost: a worker was lost; names it.
        CommError: a worker didn't connect in time, or can't be reached.
    """
    workers = len(invitation.names)
    with closing(_open(registered, invitation, limit)) as served:
        layout = layout_of(invitation)
        values = sum(bucket.numel for bucket in layout.buckets)
        how = invitation.optimizer or f"wire {invitation.wire}"
        report(
            f"serving {many(workers, 'worker')}: {many(values, 'value')} of model "
            f"{invitation.model}, {how}{_part(invitation)}."
        )
        try:
            served.serve(_reporting(served, invitation, report))
            registered.rest()  # before the run ends, and removes what it has in the store
            served.release()
        except PeerLost as error:
            peer = error.peer
            lost = "a worker" if peer is None else invitation.names[peer]
            raise PeerLost(f"the {invitation.role} lost {lost}: {error.cause}.") from error
        finally:
            report(_account(served, invitation))


def _open(registered: RegisteredServer, invitation: Invitation, limit: float) -> Serving:
    """Connect to the workers, and return what serves them."""
    if not invitation.asynchronous:
        layout = layout_of(invitation)
        window = _connect(registered, invitation, invitation.purpose, layout, limit)
        if invitation.role == PARAMETERS:
            return ParameterServer(window, layout, _timeout(invitation))
        return ShardServer(window, layout)
    shards = OwnedShards()
    base, _, first = invitation.purpose.rpartition("/")
    servers = AsynchronousServers()
    with ExitStack() as undo:
        undo.callback(servers.close)
        for worker in range(len(invitation.names)):
            layout = layout_of(invitation, worker)
            purpose = f"{base}/{int(first) + worker}"
            window = _connect(registered, invitation, purpose, layout, limit)
            scales_rate = invitation.scales_rate
            timeout = _timeout(invitation)
            server = ParameterServer(window, layout, timeout, shards, scales_rate=scales_rate)
            servers.add(server)
        undo.pop_all()
    return servers


def _timeout(invitation: Invitation) -> Timeout:
    return Timeout(invitation.timeout, invitation.timeout)


def _connect(
    registered: RegisteredServer,
    invitation: Invitation,
    purpose: str,
    layout: Layout,
    limit: float,
) -> Window:
    """Open the server's window for a purpose, and connect to its workers."""
    server = layout.topology.owners[invitation.number]
    bootstrap = Bootstrap(
        addresses=WorkersAddresses(registered, invitation, purpose, limit),
        rank=server,
        world_size=len(invitation.names) + len(invitation.servers),
        token=invitation.token,
        purpose=purpose,
        limit=limit,
        only=(*layout.topology.contributors, server),
    )
    return connect_window(
        bootstrap,
        (server,),
        "127.0.0.1",  # a server connects to all workers, and none to it
        layout.server_size,
        layout.notifications,
        connections=invitation.connections,
        silence_limit=_SILENCE_S,
    )


def _part(invitation: Invitation) -> str:
    """Return which of the servers this is, as the end of a sentence; "" where there is one."""
    count = len(invitation.servers)
    return f", as server {invitation.number + 1} of {count}" if count > 1 else ""


def serve_generations(
    registered: RegisteredServer,
    invitation: Invitation,
    *,
    model: str = "",
    limit: float,
    report: Callable[[str], None],
    set_serving: Callable[[bool], None] = lambda serving: None,
) -> None:
    """Answer an invitation, serve, and continue with the workers' next generation after a loss.

    Parameter servers also continue when the workers bind other parameters.

    Args:
        registered: the server's registration.
        invitation: the first one.
        model: as of `refusal`.
        limit: as of `serve`, for the first generation.
        report: receives lines about what is served.
        set_serving: called with True before workers are served, and False after.

    Raises:
        ConfigError: the invitation is refused; says why.
        CommError: as `serve`, and the workers have no next generation.
    """
    while True:
        reason = refusal(invitation, model)
        registered.answer(invitation, reason)
        if reason:
            raise ConfigError(f"this server refuses to serve the run: {reason}")
        set_serving(True)
        loss: CommError | None = None
        try:
            serve(registered, invitation, limit=limit, report=report)
        except CommError as error:
            loss = error
        if loss is None and invitation.role == AVERAGING:
            return
        set_serving(False)
        following = registered.following(invitation)
        if loss is not None:
            if following is None:
                raise loss
            report(f"{loss} The workers continue in their next generation.")
        if following is None:
            return
        invitation = following
        limit = following.timeout


def layout_of(invitation: Invitation, worker: int | None = None) -> Layout:
    """Return the layout of the window of an invitation; `worker`: the only one in this window.

    Raises:
        ConfigError: the codec isn't one of merges.
        CommError: the workers' layout is another.
    """
    codec = merge_codec(invitation.wire)
    specs = [
        BucketSpec(
            lengths=bucket.lengths,
            dtype=_DTYPES[bucket.dtype],
            codec=codec if bucket.encoded else None,
            suppresses_zeros=bucket.suppresses_zeros,
            returns_parameters=bucket.returns_parameters,
            slots=bucket.slots,
        )
        for bucket in invitation.buckets
    ]
    topology = Topology.of(invitation.workers_per_machine)
    if worker is not None or invitation.asynchronous:
        topology = Topology(groups=((worker or 0,),))
    topology = topology.served_by(*invitation.servers, first=len(invitation.names))
    layout = lay_out(specs, topology)
    if layout.server_size != invitation.size:
        raise CommError(
            f"The workers expect a window of {invitation.size:,} bytes, but the server's has "
            f"{layout.server_size:,}: install the same version of Paceline on all machines."
        )
    return layout


def _reporting(
    served: Serving, invitation: Invitation, report: Callable[[str], None]
) -> Callable[[], None]:
    """Return a check that reports about once a minute what was served so far."""
    reported = time.monotonic()
    versions = 0

    def check() -> None:
        nonlocal reported, versions
        now = time.monotonic()
        if now - reported >= _REPORT_S:
            reported = now
            before = versions
            versions = min(served.versions, default=0)
            if versions > before:
                report(_account(served, invitation))

    return check


def _account(served: Serving, invitation: Invitation) -> str:
    size = served.nbytes / 2**20
    what = "exchange" if invitation.role == PARAMETERS else "merge"
    return f"{many(min(served.versions, default=0), what)} of {size:,.1f} MiB, sent to each worker."
