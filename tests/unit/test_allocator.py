"""The allocator keeps what is freed: a step's memory isn't faulted in again."""

from __future__ import annotations

import os
import subprocess
import sys

# glibc raises its own thresholds as it goes, at times enough: this holds them where they begin.
FRUGAL = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
PROGRAM = """
import resource, sys
import torch
from paceline.cluster.supervision.allocator import keep_freed_memory

torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(5):
    step = [torch.ones(1_000_000) for _ in range(20)]
    del step
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step = [torch.ones(1_000_000) for _ in range(20)]
    del step
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(manner: str) -> int:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, manner],
        env={**os.environ, **FRUGAL},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(ended.stdout)


def test_memory_that_is_freed_is_not_faulted_in_again() -> None:
    pages = 5 * 20 * 4_000_000 // 4096
    assert faults("keep") < pages // 10
    assert faults("give back") > pages // 2
