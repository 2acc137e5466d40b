"""Setting of the C allocator of what computes: memory freed by a step stays for the next one.

By default glibc returns freed memory to the kernel, which zeroes it again page by page: 25,000 page
faults in a step of a ResNet-50 on a core, a fifth of its time.

What is kept has holes. glibc cuts aligned memory, such as a tensor's, from a larger piece, so a
hole of exactly its size isn't used again. In the first steps, while momenta and copies are made
between gradients that come and go, the holes grow to once or twice the weights, and with some
models later by some per cent a step. Their pages go back to the kernel by trims (malloc_trim(3)).
What a trim gives back of a step's own memory is faulted in once more, at 1.4 µs a page. So it is
made before a backward pass, when the activations are there; but gradients that `zero_grad` has
dropped are free then, too. After the first steps there is one only where memory has grown.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
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
_STATM = Path("/proc/self/statm")
_FIRST_STEPS = 8  # in which a step's memory takes its places
_GROWTH = 1 / 64  # of this process's own memory


def keep_freed_memory() -> bool:
    """Tell this process's allocator to keep what is freed; False where it isn't glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES) and mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))


def own_memory() -> int:
    """Return the bytes of memory that this process alone has; 0 where the kernel doesn't say."""
    try:
        _, resident, shared, *_ = map(int, _STATM.read_text().split())
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def return_freed_memory() -> None:
    """Give the pages of freed memory back to the kernel, where the allocator is glibc's."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class HoleTrims:
    """Trims of a process's holes before backward passes: in the first steps, and where they grow.

    Args:
        memory: returns the bytes of memory that this process alone has.
        trim: gives freed memory back.
    """

    def __init__(
        self, memory: Callable[[], int] = own_memory, trim: Callable[[], None] = return_freed_memory
    ) -> None:
        self._memory = memory
        self._trim = trim
        self._least: int | None = None  # with a whole step's memory, since the last trim

    def before_backward(self, steps: int) -> None:
        """Trim, where that is due after so many steps of the same kind."""
        if steps <= _FIRST_STEPS:
            self._least = None
            self._trim()
            return
        memory = self._memory()
        if self._least is not None and memory > (1 + _GROWTH) * self._least:
            self._least = None
            self._trim()
        else:
            self._least = memory if self._least is None else min(self._least, memory)


def machine_memory() -> int:
    """Return the bytes of memory that this machine has, or this process's container."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # no such group, or "max"
            sizes.append(int(Path(path).read_text()))
    return min(sizes)
