"""The allocator keeps what is freed: a step's memory isn't faulted in again, and holes go back."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

import paceline
from paceline.cluster.supervision.allocator import HoleTrims, own_memory
from tests.harness.library.small_training import BATCH, loss_of, network, samples, sgd

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


def trims(sizes: Sequence[int]) -> list[int]:
    """Return the steps with a trim, given the memory before each step's backward pass."""
    found: list[int] = []
    step = 0
    holes = HoleTrims(memory=lambda: sizes[step], trim=lambda: found.append(step))
    for step in range(len(sizes)):
        holes.before_backward(step)
    return found


def test_the_first_steps_are_trimmed_and_then_none_where_memory_stays() -> None:
    assert trims([100_000] * 30) == [*range(8)]
    assert trims([100_000 + 200 * (step % 5) for step in range(30)]) == [*range(8)]


def test_where_memory_grows_a_trim_follows() -> None:
    # A trim at step 12, after which the holes are gone, and grow again.
    sizes = [*[100_000] * 10, 101_000, 101_500, 102_000, *[100_000] * 4, 102_000, *[100_000] * 4]
    assert trims(sizes) == [*range(8), 12, 17]
    # By so much in each step, that each second one has a trim: between, the memory is measured.
    assert trims([100_000 + 3_000 * step for step in range(16)]) == [*range(8), 9, 11, 13, 15]


def test_the_least_memory_since_a_trim_counts() -> None:
    sizes = [*[100_000] * 8, 103_000, 100_000, 102_000, *[100_000] * 4]
    assert trims(sizes) == [*range(8), 10]


def test_a_step_looks_at_its_memory_once_before_its_first_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(HoleTrims, "before_backward", lambda _, steps: looks.append(steps))
    with paceline.join() as world:
        model = network()
        optimizer = sgd(model)
        paceline.parallelize(model, optimizer, world)
        for number, (x, y) in enumerate(paceline.loader(samples(), BATCH, world)):
            with world.step():
                assert looks == [*range(number)]
                for _ in range(2):
                    loss_of(model, x, y).backward()
                    assert looks == [*range(number + 1)]
                optimizer.step()
                optimizer.zero_grad()
    assert len(looks) == 5


def test_own_memory_is_what_this_process_has_touched_and_shares_with_none() -> None:
    before = own_memory()
    touched = bytearray(b"1") * 50_000_000
    assert 0.9 * len(touched) < own_memory() - before < 1.2 * len(touched)
    del touched
    before = own_memory()
    with mmap.mmap(-1, 50_000_000) as shared:  # MAP_SHARED
        shared.write(b"1" * 1_000_000 * 50)
        assert own_memory() - before < 10_000_000
