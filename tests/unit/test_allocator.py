"""The allocator keeps what is freed: a step's memory isn't faulted in again, and holes go back."""

from __future__ import annotations

import os
import subprocess
import sys

from paceline.cluster.supervision.allocator import is_trim_due

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
HOLES = """
import ctypes
import torch
from paceline.cluster.supervision.allocator import keep_freed_memory, return_freed_memory

def resident():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

keep_freed_memory()
tensors = [torch.ones(1_000_000) for _ in range(20)]
whole = resident()
del tensors[::2]
kept = resident()
return_freed_memory()
print(whole - kept, whole - resident())
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


def test_holes_between_tensors_go_back_to_the_kernel_by_a_trim() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HOLES], capture_output=True, text=True, check=True
    )
    kept, trimmed = map(int, ended.stdout.split())
    assert kept < 4_000_000
    assert trimmed > 0.9 * 10 * 4_000_000


def test_the_first_steps_are_trimmed_and_then_each_second() -> None:
    due = [step for step in range(16) if is_trim_due(step)]
    assert due == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14]
