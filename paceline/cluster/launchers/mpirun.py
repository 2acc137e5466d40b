"""Reader of the variables that mpirun sets: MPICH's and Intel's, and Open MPI's.

Neither names a rendezvous, nor numbers the machines. MPICH's rank alone means nothing: Slurm sets
the same `PMI_RANK` for programs that it starts itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.cluster.launchers.launched_process import LaunchedProcess, read_numbers

_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)


def read_mpirun(variables: Mapping[str, str]) -> LaunchedProcess:
    """Read rank, world size, local rank and local world size.

    Raises:
        ConfigError: the variables contradict each other, or some are missing; names them.
    """
    names = _OPEN_MPI if _OPEN_MPI[0] in variables else _MPICH
    return read_numbers(variables, "mpirun", "mpirun", names)
