"""Speed of the ranks' links, measured by sums of two sizes over all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from paceline.comm.communicator import Communicator, total

_SIZES = 2**16, 2**19  # float32 values: 256 KiB and 2 MiB
_BYTES = 4 * (_SIZES[1] - _SIZES[0])
_ROUNDS = 3


def seconds_per_byte(
    communicator: Communicator, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return how many seconds a sum over all ranks takes for each further byte; collective.

    The time of a short sum is subtracted, so latency doesn't count. The shortest of a few times
    counts for each size, because links and processors are shared. At 1 Gbit/s it takes 60 ms with
    two ranks, and 120 ms with many.

    Args:
        communicator: connects the ranks.
        clock: returns seconds since an arbitrary origin.

    Returns:
        the mean over the ranks, the same on all.
    """
    what = "the measurement of the link"
    total(communicator, torch.zeros(1), what)  # the ranks begin together
    shortest = []
    for size in _SIZES:
        values = torch.zeros(size)
        times = []
        for _ in range(_ROUNDS):
            begin = clock()
            communicator.all_reduce(values).wait(what)
            times.append(clock() - begin)
        # The shortest: other work on the machine makes times only longer.
        shortest.append(min(times))
    # The difference of two sizes leaves out what a sum costs at any size.
    own = max(0.0, shortest[1] - shortest[0]) / _BYTES
    mean = total(communicator, torch.tensor(own, dtype=torch.float64), what)
    return mean.item() / communicator.world_size
