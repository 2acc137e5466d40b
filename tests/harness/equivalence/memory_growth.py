"""Whether memory, files and threads stay as they are over many steps of `notified`.

    python -m tests.harness.equivalence.memory_growth [--steps 10000] [--kinds shared tcp]

Two ranks, threads of this process, train a tiny model on real windows. What the process has a
tenth of the way is compared with what it has in the end.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from tests.harness.equivalence.deadlock_hunt import ALL_KINDS, Draw, notified
from tests.harness.equivalence.large_batch import Training, made_up_batches

_MEGABYTE = 2**20
_HEAP = 64 * _MEGABYTE  # what a heap of the C library reserves, at a multiple of it


@dataclass(frozen=True)
class Usage:
    """What a process has: bytes of memory, mappings, open files, threads, Python's objects.

    Attributes:
        memory: bytes that are resident.
        mappings: all mappings, those of the allocator's heaps included.
        mapped_files: mappings of files, and the kernel's own.
        shared_memory: mappings of memory that processes share.
        guards: mappings without access, one below each thread's stack; the C library has some more,
            of stacks of ended threads, for the next ones.
        heaps: mappings of the C library's heaps, two each. It makes another one where threads
            allocate at the same moment, up to eight a core.
        files: open files.
        threads: threads.
        objects: Python's objects that are tracked.
    """

    memory: int
    mappings: int
    mapped_files: int
    shared_memory: int
    guards: int
    heaps: int
    files: int
    threads: int
    objects: int

    @staticmethod
    def now() -> Usage:
        """Look at this process, once what it has freed is the system's again."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        kinds = Counter(map(_kind, Path("/proc/self/maps").read_text().splitlines()))
        return Usage(
            memory=pages * os.sysconf("SC_PAGE_SIZE"),
            mappings=kinds.total(),
            mapped_files=kinds["file"],
            shared_memory=kinds["shared memory"],
            guards=kinds["guard"],
            heaps=kinds["heap"],
            files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            objects=len(gc.get_objects()),
        )

    def is_flat(self, before: Usage, steps: int) -> bool:
        """Return whether this is no more than before: an object in ten steps and 4 MB at most."""
        same = (self.files, self.threads) == (before.files, before.threads)
        few = self.objects - before.objects < steps / 10
        return same and few and self.memory - before.memory < 4 * _MEGABYTE


def _kind(line: str) -> str:
    """Return the kind of a mapping, by its line in /proc/self/maps."""
    addresses, access, _, _, _, *rest = line.split(maxsplit=5)
    name = rest[0] if rest else ""
    if name.startswith(("/memfd:", "/dev/shm/", "/dev/zero")):
        return "shared memory"
    if name and name != "[heap]" and not name.startswith("[anon"):
        return "file"
    start, end = (int(address, 16) for address in addresses.split("-"))
    reserved = access == "---p" and end % _HEAP == 0 and end - start > _MEGABYTE
    if not name and (start % _HEAP == 0 or reserved):
        return "heap"
    return "guard" if access == "---p" else "anonymous"


def train(kind: str, steps: int) -> tuple[Usage, Usage]:
    """Train for so many steps; return what there was after a tenth, and in the end."""
    seen: list[Usage] = []

    def look(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
        if rank == 0 and number in (steps // 10, steps - 1):
            seen.append(Usage.now())

    torch.manual_seed(1)
    training = Training(
        nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 10)).double(),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        made_up_batches([2]) * steps,
        change=look,
        gamma=1.0,
    )
    drawn = Draw(
        seed=0,
        kind=kind,
        machines=(2,) if kind == "shared" else (1, 1),
        widths=(),
        normalised=False,
        batches=(),
        bucket_bytes=1000,
        delay=None,
        connections=1,
    )
    training.on_threads(2, drawn.bucket_bytes, notified(drawn, 60))
    before, after = seen
    return before, after


def main() -> int:
    """Train on each kind; return 1 if something grows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kinds", nargs="+", choices=ALL_KINDS, default=["shared", "tcp"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the ranks wait for each other
    grown = 0
    for kind in options.kinds:
        before, after = train(kind, options.steps)
        flat = after.is_flat(before, options.steps)
        grown += not flat
        print(
            f"{kind}, steps {options.steps // 10} and {options.steps}: "
            f"memory {before.memory / _MEGABYTE:.1f} and {after.memory / _MEGABYTE:.1f} MB, "
            f"files {before.files} and {after.files}, threads {before.threads} and "
            f"{after.threads}, objects {before.objects} and {after.objects}: "
            + ("flat" if flat else "it grows")
        )
    return int(grown > 0)


if __name__ == "__main__":
    sys.exit(main())
