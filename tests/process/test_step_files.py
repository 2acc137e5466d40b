"""Which files run in a step between two machines: by the script, and by docs/inside/files.md."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.data_parallel import DataParallel
from paceline.api.world import World
from paceline.codecs.kernels import compiled
from paceline.comm.connection_window import ConnectionWindow
from paceline.comm.transport import event_loop as loop
from paceline.comm.transport.tcp import connect_by_tcp
from paceline.replica.read_tracing import ReadTracer
from tests.harness.equivalence.step_files import AROUND, files_listed, functions_of_a_step
from tests.harness.processes.python_program import ROOT

pytestmark = pytest.mark.timeout(300)  # numba may have to compile first


@pytest.fixture(scope="module")
def files() -> set[str]:
    """The files of one step."""
    return set(functions_of_a_step(ROOT))


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(World, id="the script's step"),
        pytest.param(DataParallel, id="the synchronizer"),
        pytest.param(ConnectionWindow, id="the window"),
        pytest.param(loop, id="a compiled loop that runs all the time"),
        pytest.param(compiled, id="the compiled codec, in a thread of the exchange alone"),
    ],
)
def test_a_step_runs(part: Any, files: set[str]) -> None:
    assert file_of(part) in files


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(make_allreduce, id="another synchronizer"),
        pytest.param(ReadTracer, id="what the first step learns by"),
        pytest.param(connect_by_tcp, id="what only connects"),
    ],
)
def test_a_step_does_not_run(part: Any, files: set[str]) -> None:
    assert file_of(part) not in files


def test_the_packages_around_the_step_do_not_count(files: set[str]) -> None:
    assert not {file for file in files if file.split("/")[0] in AROUND}


def test_the_page_lists_the_files_of_a_step(files: set[str]) -> None:
    listed = files_listed((ROOT / "docs/inside/files.md").read_text(encoding="utf-8"))
    assert listed == files


def file_of(part: Any) -> str:
    """Return the file of a class, a function or a module, by its path in the package."""
    file = inspect.getsourcefile(part)
    assert file is not None
    return str(Path(file).relative_to(ROOT / "paceline"))
