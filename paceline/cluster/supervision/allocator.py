"""Settings of the C allocator of processes that compute: a step's freed memory serves the next one.

By default glibc returns freed memory to the kernel, which zeroes it again page by page: 25,000 page
faults in a step of a ResNet-50 on a core, a fifth of its time.

What is kept has holes. glibc cuts aligned memory, such as a tensor's, from a larger piece, so a
hole of exactly its size isn't used again. In the first steps, while momenta and copies are made
between gradients that come and go, the holes grow to once or twice the weights, and with some
models later by some per cent a step. Their pages go back to the kernel by trims (malloc_trim(3)).
A trim gives all free pages back. Those that a step uses are faulted in once more, at 1.1 to 1.4 µs
a page. So it is made before a backward pass, when the activations aren't free; but gradients that
`zero_grad` has dropped are. After the first steps, therefore, there is a trim only where memory has
grown. Until then the process keeps what its largest step, or an evaluation, has used.
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
_FIRST_STEPS = 8  # with a trim each, while momenta and copies are made
_GROWTH = 1 / 64  # of this process's own memory, which is left to holes


def keep_freed_memory() -> bool:
    """Tell this process's allocator to keep what is freed; False where it isn't glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES) and mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))


def own_memory() -> int:
    """Return the resident bytes of this process that neither files nor shared memory back.

    0 where the kernel doesn't say.
    """
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
    """Schedule of a process's trims: in each of the first steps, then where its memory has grown.

    Memory is measured before backward passes, from the step after a trim on: it then includes again
    the pages that the trim gave back and a step uses. The next trim is due where a measurement is
    more than 1/64 above the least one since the last trim.

    Args:
        memory: returns this process's own memory, bytes.
        trim: gives freed memory back.
    """

    def __init__(
        self, memory: Callable[[], int] = own_memory, trim: Callable[[], None] = return_freed_memory
    ) -> None:
        self._memory = memory
        self._trim = trim
        self._least: int | None = None  # memory measured since the last trim

    def before_backward(self, steps: int) -> None:
        """Trim, if that is due in a step whose backward pass is about to begin.

        Args:
            steps: completed steps since the generation began, or since a checkpoint was written.
        """
        if steps < _FIRST_STEPS:
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
