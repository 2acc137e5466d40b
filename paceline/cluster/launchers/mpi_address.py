"""Rendezvous address under mpirun: rank 0's, broadcast by MPI.

Only bytes are exchanged, JSON, by `mpi_broadcast.py`; nothing is unpickled. See the extra `mpi`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from paceline.cluster.launchers.launched_process import LaunchedProcess
from paceline.errors import CommError, ConfigError, Message

_PROGRAM = Path(__file__).with_name("mpi_broadcast.py")
_OTHER_RENDEZVOUS = (
    "or give the processes a rendezvous: --master, --file_store_path, --redis_host, --redis_url or "
    "--etcd"
)


def broadcast_address(
    launched: LaunchedProcess, addresses: Sequence[str], port: int, timeout: float
) -> tuple[tuple[str, ...], int]:
    """Return rank 0's addresses and port; collective.

    Args:
        launched: this process, as mpirun's variables describe it.
        addresses: at which the others may reach rank 0; what the others give isn't used.
        timeout: seconds to wait for the others.

    Raises:
        ConfigError: mpi4py isn't there.
        CommError: the exchange failed, or some processes didn't take part in time.
    """
    if find_spec("mpi4py") is None:
        raise ConfigError(
            "The processes that mpirun started find each other through mpi4py, which isn't "
            f"installed: pip install 'paceline[mpi]', {_OTHER_RENDEZVOUS}."
        )
    try:
        done = subprocess.run(
            # Without -P, Python would look for mpi4py in the script's folder first.
            [sys.executable, "-P", str(_PROGRAM)],
            input=json.dumps([list(addresses), port]).encode(),
            capture_output=True,
            close_fds=False,  # mpirun talks with its processes over one
            timeout=timeout,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise CommError(
            Message(
                "Some of the {} processes that mpirun started didn't connect within {:g} s: check "
                "the output of all processes, or give a longer {--first_iter_timeout}.",
                launched.world_size,
                timeout,
            )
        ) from error
    except subprocess.CalledProcessError as error:
        errors = error.stderr.decode(errors="replace").strip().splitlines() or ["no error output"]
        raise CommError(
            f"mpi4py couldn't connect the processes that mpirun started ({errors[-1]}): install "
            f"an mpi4py that is built against the same MPI as this mpirun, {_OTHER_RENDEZVOUS}."
        ) from error
    shared, port = json.loads(done.stdout)
    return tuple(shared), port
