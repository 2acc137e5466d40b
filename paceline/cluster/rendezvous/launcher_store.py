"""Store for the rendezvous of processes that torchrun, srun or mpirun started.

    a launcher with a store     in that store: torchrun's
    one that gives an address   in rank 0's TCP store there: srun, torchrun without a store
    any other                   in rank 0's TCP store, at a free port that MPI broadcasts: mpirun

A rendezvous that options give comes before all but a launcher's own store.

A server is kept for as long as the process lives, as a script may join again: MPI connects a
process only once, and the others may be looking there already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch._C._distributed_c10d import TCPStore

from paceline.cluster.environment import read_secret
from paceline.cluster.launchers.launched_process import LaunchedProcess
from paceline.cluster.launchers.mpi_address import broadcast_address
from paceline.cluster.print_message import print_message
from paceline.cluster.rendezvous.machine_rendezvous import UNPROTECTED_STORE_WARNING, serve
from paceline.cluster.rendezvous.reachability import own_addresses
from paceline.cluster.rendezvous.registered_machine import STORE_LIMIT
from paceline.cluster.stores.store_spec import StoreSpec, run_space
from paceline.cluster.stores.tcp_store import TcpStore, serve_tcp
from paceline.errors import CommError

_Opened = tuple[TCPStore | None, StoreSpec]
_OPENED: dict[str, _Opened] = {}  # by the launcher's address; MPI's is ""


def open_rendezvous(
    launched: LaunchedProcess,
    flags: StoreSpec | None,
    interface_names: Sequence[str],
    timeout: float,
) -> _Opened:
    """Return where the rendezvous is; rank 0 serves the TCP store if the launcher doesn't.

    Args:
        launched: this process, as its launcher describes it.
        flags: the store that flags name, if they name one.
        interface_names: the network interfaces to use; none: all.
        timeout: seconds to wait for the others of mpirun's processes.

    Returns:
        the store's server, where this process serves it, and the job's space in the store.

    Raises:
        ConfigError: the store's port can't be opened, or mpirun's processes have no rendezvous.
        CommError: rank 0 can't be reached, or mpirun's processes didn't come in time.
    """
    if not launched.master and flags is None:
        if "" not in _OPENED:
            _OPENED[""] = _open_by_mpi(launched, interface_names, timeout)
        return _OPENED[""]
    space = run_space(launched.launch_id)
    if flags is None or launched.launcher_serves_store:
        secret = read_secret() if flags is None else flags.secret
        rendezvous = StoreSpec(kind="tcp", address=launched.master, space=space, secret=secret)
    else:
        rendezvous = replace(flags, space=space if launched.launch_id else flags.space)
    if not rendezvous.served_by_run or launched.launcher_serves_store or launched.rank > 0:
        return None, rendezvous
    if rendezvous.address not in _OPENED:
        port_source = "MASTER_PORT" if flags is None else "--master"
        served = serve(rendezvous, tuple(interface_names), port_source)
        _OPENED[rendezvous.address] = served
    return _OPENED[rendezvous.address]


def _open_by_mpi(
    launched: LaunchedProcess,
    interface_names: Sequence[str],
    timeout: float,
) -> _Opened:
    addresses = own_addresses(interface_names, other_machines=not launched.one_machine)
    secret = read_secret()
    server = None
    port = 0
    if launched.rank == 0:
        # With several networks it isn't known yet at which of them the other machines are.
        address = addresses[0] if len(addresses) == 1 else ""
        server = serve_tcp(address, 0, STORE_LIMIT)
        port = server.port
        if not launched.one_machine and not secret:
            print_message(UNPROTECTED_STORE_WARNING.format(address or "all interfaces", port))
    addresses, port = broadcast_address(launched, addresses, port, timeout)
    address = f"{_answering(addresses, port)}:{port}"
    return server, StoreSpec(kind="tcp", address=address, space=run_space("mpirun"), secret=secret)


def _answering(addresses: Sequence[str], port: int) -> str:
    """Return the first of rank 0's addresses at which its store answers."""
    reasons = []
    for address in addresses:
        try:
            TcpStore(f"{address}:{port}", "", STORE_LIMIT).close()
        except CommError as error:
            reasons.append(str(error).rstrip("."))
        else:
            return address
    raise CommError(
        f"Rank 0 can't be reached at any of its addresses ({'; '.join(reasons)}): check firewalls, "
        "or use --distributed_interfaces to name the interfaces that connect the machines."
    )
