"""The address that mpirun's processes share, where MPI can't help; `test_launchers_join` has it."""

from __future__ import annotations

from importlib.machinery import BuiltinImporter

import pytest

from paceline.cluster.launchers.launched_process import LaunchedProcess
from paceline.cluster.launchers.mpi_address import broadcast_address
from paceline.errors import CommError, ConfigError

FIRST = LaunchedProcess(launcher="mpirun", rank=0, world_size=2, local_rank=0, local_world_size=2)


def test_without_mpi4py_both_remedies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.meta_path", [BuiltinImporter])
    with pytest.raises(ConfigError) as caught:
        broadcast_address(FIRST, ["127.0.0.1"], 1, 5)
    assert "pip install 'paceline[mpi]', or give the processes a rendezvous: --master" in str(
        caught.value
    )


def test_an_mpi_that_cant_be_loaded_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    with pytest.raises(CommError) as caught:
        broadcast_address(FIRST, ["127.0.0.1"], 1, 20)
    assert "mpi4py couldn't connect the processes that mpirun started (" in str(caught.value)
    assert "the same MPI as this mpirun, or give the processes" in str(caught.value)
