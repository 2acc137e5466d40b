"""Where the processes that a launcher started meet.

    torchrun   in its own TCP store
    mpirun     at rank 0's TCP store, at a free port that MPI tells them
    srun       at rank 0's TCP store, at a node and a port that all derive from Slurm's variables

A meeting place that flags give comes before those of mpirun and srun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch._C._distributed_c10d import TCPStore

from paceline.cluster.launchers.launched_process import LaunchedProcess
from paceline.cluster.launchers.mpi_address import share_address
from paceline.cluster.rendezvous.reachability import candidates, interfaces
from paceline.cluster.rendezvous.registered_machine import STORE_LIMIT
from paceline.cluster.stores.store_spec import StoreSpec, run_space
from paceline.cluster.stores.tcp_store import connect_tcp, serve_tcp, split_address
from paceline.errors import CommError

_HERE = ("127.0.0.1", "localhost")


def meet(
    launched: LaunchedProcess, flags: StoreSpec | None, wanted: Sequence[str], timeout: float
) -> tuple[TCPStore | None, StoreSpec]:
    """Return where the processes meet; rank 0 serves the place if nobody else does.

    Args:
        launched: this process's place by its launcher.
        flags: where flags say to meet.
        wanted: the network interfaces to use; none: all.
        timeout: seconds to wait for the others of mpirun's processes.

    Returns:
        the store's server, where this process serves it, and the job's space in the store.

    Raises:
        ConfigError: the place can't be had, or mpirun's processes have none.
        CommError: rank 0 can't be reached, or mpirun's processes didn't come in time.
    """
    if launched.launcher == "mpirun" and flags is None:
        return _meet_by_mpi(launched, wanted, timeout)
    if flags is None or launched.serves:
        place = StoreSpec(kind="tcp", address=launched.master, space=_space(launched))
    else:
        place = replace(flags, space=_space(launched) if launched.start else flags.space)
    if place.kind != "tcp" or launched.serves or launched.rank > 0:
        return None, place
    host, port = split_address(place.address)
    given = "MASTER_PORT" if flags is None else "--master"
    server = serve_tcp("127.0.0.1" if host in _HERE else "", port, STORE_LIMIT, given)
    return server, replace(place, address=f"127.0.0.1:{port}")


def _meet_by_mpi(
    launched: LaunchedProcess, wanted: Sequence[str], timeout: float
) -> tuple[TCPStore | None, StoreSpec]:
    apart = not launched.one_machine
    addresses: Sequence[str] = candidates(interfaces(), wanted) if apart else ["127.0.0.1"]
    server = serve_tcp("" if apart else "127.0.0.1", 0, STORE_LIMIT) if launched.rank == 0 else None
    port = server.port if server is not None else 0
    addresses, port = share_address(launched, addresses, port, timeout)
    return server, StoreSpec(
        kind="tcp", address=f"{_answering(addresses, port)}:{port}", space=run_space("mpirun")
    )


def _answering(addresses: Sequence[str], port: int) -> str:
    """Return the first of rank 0's addresses at which its store answers."""
    reasons = []
    for address in addresses:
        try:
            connect_tcp(address, port, STORE_LIMIT)
        except CommError as error:
            reasons.append(str(error).rstrip("."))
        else:
            return address
    raise CommError(
        f"Rank 0 can't be reached at any of its addresses ({'; '.join(reasons)}): check firewalls, "
        "or name the interfaces that connect the machines by --distributed_interfaces."
    )


def _space(launched: LaunchedProcess) -> str:
    return run_space(launched.start)
