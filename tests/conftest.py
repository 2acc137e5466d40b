"""What all tests share."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.harness.rewritten_tests import rewrite_tests

# Whichever test starts multiprocessing's fork server first: its processes have what they need.
multiprocessing.set_forkserver_preload(
    [
        *("tests.harness.processes.uncollected_imports", "torch", "torch.distributed"),
        *("torch._dynamo", "numpy", "numba"),
        *("paceline", "paceline.cli.main", "tests.harness.processes.gloo_processes"),
        *("tests.harness.processes.supervisor_stage", "tests.harness.network.stores", "pytest"),
        "tests.harness.processes.frozen_imports",
    ]
)

# Hypothesis would read 500 source files, for ten seconds, to draw their constants now and then.
providers._get_local_constants = lambda: providers._local_constants

# An example, or how it is drawn, may take long where the machine is busy.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Whoever runs the tests in the background (nohup, a script's &) has these ignored, and so would the
# processes have that tests send them to.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# Triton reads it when it is imported, which torch's compiler does as well, in any of the tests.
os.environ["TRITON_INTERPRET"] = "1"

_modules = 0  # that were imported when the collector was last told to leave alone what there is


def pytest_configure(config: pytest.Config) -> None:
    """Import torch, of whose 400,000 objects none is garbage; xdist's own process runs no test."""
    if getattr(config.option, "numprocesses", None):
        rewrite_tests(config)
        return
    gc.disable()
    import torch

    torch.set_num_threads(1)  # several ranks, as threads or processes, share the few cores
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        if not devices.is_available():
            devices.manual_seed_all = _seed_none


def _seed_none(seed: int) -> None:
    """Stand for seeding GPUs, where none is: torch would keep each call's stack, for half a ms."""


def pytest_runtest_logstart() -> None:
    """Have the garbage collector leave alone what was imported, at the first test and later."""
    global _modules
    if len(sys.modules) > _modules + 100:
        gc.collect()
        gc.freeze()
        gc.enable()
        _modules = len(sys.modules)


@pytest.fixture
def forked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the servers of decode pools; those of a real training process import torch themselves.

    A server takes a tenth of a processor second instead of two.
    """
    from tests.harness.processes.fork_server import ChildPopen

    monkeypatch.setattr(subprocess, "Popen", ChildPopen)


def pytest_unconfigure() -> None:
    """Let the last collection find all garbage: Triton lists on stderr what it takes for leaks."""
    gc.unfreeze()
