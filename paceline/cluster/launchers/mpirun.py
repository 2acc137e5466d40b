"""Reader of the variables that mpirun sets: MPICH's and Intel's, and Open MPI's.

Neither says where to meet, nor numbers the machines. MPICH's rank alone means nothing: Slurm sets
the same `PMI_RANK` for programs that it starts itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.cluster.launchers.launched_process import LaunchedProcess, VariableNames

_MPICH = VariableNames(
    launcher="mpirun",
    command="mpirun",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
)
_OPEN_MPI = VariableNames(
    launcher="mpirun",
    command="mpirun",
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)


def by_mpirun(variables: Mapping[str, str]) -> bool:
    """Tell whether mpirun started this process."""
    return _MPICH.local_rank in variables or _OPEN_MPI.rank in variables


def read_mpirun(variables: Mapping[str, str]) -> LaunchedProcess:
    """Return the process's place.

    Raises:
        ConfigError: the variables contradict each other, or some are missing; names them.
    """
    names = _OPEN_MPI if _OPEN_MPI.rank in variables else _MPICH
    return names.read(variables)
