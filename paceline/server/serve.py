"""An averaging server: opens the window to which the workers invite it, and serves to their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from itertools import count

import torch

from paceline.cluster.rendezvous.server_registration import Invitation, RegisteredServer
from paceline.codecs.merge_codecs import merge_codec
from paceline.comm.connection_window import connect_window
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.errors import CommError, ConfigError, PeerLost, many
from paceline.reduce.put_engine.layout import BucketSpec, Layout, Topology, lay_out
from paceline.reduce.put_engine.shard_server import ShardServer
from paceline.version import VERSION

_REPORT_S = 60.0
_SILENCE_S = 60.0
_DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


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
    layout = layout_of(invitation)
    (server,) = layout.topology.owners
    numbers = count()
    bootstrap = Bootstrap(
        share=lambda where: registered.addresses(invitation.purpose, next(numbers), limit),
        rank=server,
        world_size=server + 1,
        token=invitation.token,
        purpose=invitation.purpose,
        limit=limit,
        only=layout.topology.ranks,
    )
    window = connect_window(
        bootstrap,
        (server,),
        "127.0.0.1",  # the last rank connects to all others, and none to it
        layout.server_size,
        layout.notifications,
        connections=invitation.connections,
        silence_limit=_SILENCE_S,
    )
    with closing(ShardServer(window, layout)) as served:
        values = sum(bucket.numel for bucket in layout.buckets)
        report(
            f"serving {many(server, 'worker')}: {many(values, 'value')} of model "
            f"{invitation.model}, wire {invitation.wire}."
        )
        try:
            served.serve(_reporting(served, report))
            registered.close()  # before the run ends, and removes what it has in the store
            served.release()
        except PeerLost as error:
            peer = error.peer
            lost = "a worker" if peer is None else invitation.names[peer]
            raise PeerLost(f"the averaging server lost {lost}: {error.cause}.") from error
        finally:
            report(_account(served))


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

    Args:
        registered: the server's registration.
        invitation: the first one.
        model: as of `refusal`.
        limit: as of `serve`, for the first generation.
        report: receives lines about what is served.
        set_serving: called with whether workers are served, or awaited.

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
        try:
            return serve(registered, invitation, limit=limit, report=report)
        except CommError as error:
            set_serving(False)
            following = registered.following(invitation)
            if following is None:
                raise
            report(f"{error} The workers continue in their next generation.")
            invitation = following
            limit = following.timeout


def layout_of(invitation: Invitation) -> Layout:
    """Return the layout of the window of an invitation.

    Raises:
        ConfigError: the codec isn't one of merges.
        CommError: the workers' layout is another.
    """
    codec = merge_codec(invitation.wire)
    specs = [
        BucketSpec(
            lengths=(bucket.numel,),
            dtype=_DTYPES[bucket.dtype],
            codec=codec if bucket.encoded else None,
            suppresses_zeros=bucket.suppresses_zeros,
        )
        for bucket in invitation.buckets
    ]
    topology = Topology.of(invitation.workers_per_machine).served_by("this server")
    layout = lay_out(specs, topology)
    if layout.server_size != invitation.size:
        raise CommError(
            f"The workers expect a window of {invitation.size:,} bytes, but the server's has "
            f"{layout.server_size:,}: install the same version of Paceline on all machines."
        )
    return layout


def _reporting(server: ShardServer, report: Callable[[str], None]) -> Callable[[], None]:
    """Return what reports the merges so far, about once a minute."""
    reported = time.monotonic()
    merges = 0

    def check() -> None:
        nonlocal reported, merges
        now = time.monotonic()
        if now - reported >= _REPORT_S:
            reported = now
            before = merges
            merges = min(server.versions)
            if merges > before:
                report(_account(server))

    return check


def _account(server: ShardServer) -> str:
    size = server.nbytes / 2**20
    return f"{many(min(server.versions), 'merge')} of {size:,.1f} MiB, sent to each worker."
