"""Setting of the C allocator of what computes: memory freed by a step stays for the next one.

By default glibc returns freed memory to the kernel, which zeroes it again page by page: 25,000 page
faults in a step of a ResNet-50 on a core, a fifth of its time.

What is kept has holes. glibc cuts aligned memory, such as a tensor's, from a larger piece, so a
hole of exactly its size isn't used again. In the first steps, while momenta and copies are made
between gradients that come and go, the holes grow to once or twice the weights, and later by some
per cent a step. Their pages go back to the kernel by trims (malloc_trim(3)). A trim takes a third
of a millisecond, and what it gives back of a step's own memory is faulted in once more. So it is
made before a backward pass: then the activations are there, and what is free are holes.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

# https://man7.org/linux/man-pages/man3/mallopt.3.html; an int each, the second at most 32 MiB.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_TRIM_BYTES = 2**31 - 1
_MMAP_BYTES = 2**25
_LIMITS = (  # of a control group, version 2 and 1
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
_FIRST_STEPS = 8  # in which a step's memory takes its places
_INTERVAL = 2  # steps


def keep_freed_memory() -> bool:
    """Tell this process's allocator to keep what is freed; False where it isn't glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES) and mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))


def is_trim_due(steps: int) -> bool:
    """Return whether to trim after so many steps: the first few, and then each second."""
    return steps <= _FIRST_STEPS or steps % _INTERVAL == 0


def return_freed_memory() -> None:
    """Give the pages of freed memory back to the kernel, where the allocator is glibc's."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def machine_memory() -> int:
    """Return the bytes of memory that this machine has, or this process's container."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # no such group, or "max"
            sizes.append(int(Path(path).read_text()))
    return min(sizes)
