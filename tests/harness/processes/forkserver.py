"""Multiprocessing's fork server, for functions of the tests: it has imported what they need."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PREPARED = ["torch", "torch.distributed", "torch._dynamo", "paceline", "paceline.cli.main"]


def context() -> ForkServerContext:
    """Return a context whose processes start with these modules; the first call decides."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([*PREPARED, "tests.harness.processes.gloo_processes"])
    return made
