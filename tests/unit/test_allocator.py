"""The allocator keeps what is freed: a step's memory isn't faulted in again."""

from __future__ import annotations

import os
import subprocess
import sys

# glibc raises its own thresholds as it goes, at times enough: this holds them where they begin.
FRUGAL = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
PROGRAM = """
import ctypes, resource, sys
from paceline.cluster.supervision.allocator import keep_freed_memory

libc = ctypes.CDLL(None)
libc.free.argtypes = [ctypes.c_void_p]

def allocated():
    # As torch does for a tensor on the CPU, which a step writes.
    memory = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(memory), 64, 4_000_000) == 0
    ctypes.memset(memory, 1, 4_000_000)
    return memory

def make_steps():
    for _ in range(5):
        for memory in [allocated() for _ in range(20)]:
            libc.free(memory)

if sys.argv[1] == "keep":
    assert keep_freed_memory()
make_steps()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
make_steps()
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
