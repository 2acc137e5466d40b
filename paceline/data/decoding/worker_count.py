"""The number of decode processes, measured: as many as keep the training step from waiting.

    need    samples a second of a step that doesn't wait = samples / (time - waits)
    rate    samples a second of one decode process = samples made / time spent on them
    number  need / rate, and a tenth more, up to the cores that this process may use less one

A process more is paid for by a start of some seconds, so that short runs keep the thread with which
each run begins. The number never becomes smaller.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from paceline.data.decoding.chunk_queue import NOTHING_MADE, WorkerTimes

_BATCHES = 8  # of a measurement, at least
_SECONDS = 2.0  # likewise
_WAITING = 0.02  # share of the time that steps may wait for input
_SPARE = 1.1  # capacity above the need, for images that take longer than others


class WorkerCount:
    """Measured number of decode processes.

    Args:
        limit: the largest number.
        clock: returns seconds since an arbitrary origin.

    Attributes:
        reason: sentence that says the number and why, once there is one.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.reason = ""
        self._clock = clock
        self._begun: float | None = None
        self._batches = 0
        self._samples = 0
        self._waited = 0.0
        self._before = NOTHING_MADE

    def batch(self, samples: int, waited: float, made: WorkerTimes, present: int) -> int | None:
        """Measure a batch; return another number of processes, or None.

        Args:
            samples: number of the batch's samples.
            waited: seconds for which its step waited for it.
            made: what all workers have made so far.
            present: the present number of processes.
        """
        if present >= self.limit:
            return None
        now = self._clock()
        # It waits for everything, and would be taken for a sign that processes are missing.
        if self._begun is None:  # the first batch: nothing was made ahead
            self._restart(now, made)
            return None
        self._batches += 1
        self._samples += samples
        self._waited += waited
        seconds = now - self._begun
        if self._batches < _BATCHES or seconds < _SECONDS:
            return None
        number = None
        if self._waited > _WAITING * seconds:
            number = self._wanted(seconds, made.since(self._before), present)
        self._restart(now, made)
        return number

    def _wanted(self, seconds: float, made: WorkerTimes, present: int) -> int | None:
        if not made.samples:
            return None
        rate = made.samples / made.busy
        # Where a step does nothing but wait, its need is unknown, and very large.
        need = self._samples / max(seconds - self._waited, 1e-3 * seconds)
        number = min(self.limit, max(present + 1, math.ceil(_SPARE * need / rate)))
        self.reason = (
            f"Decoding in {number} processes, of at most {self.limit}: steps waited for images "
            f"{self._waited / seconds:.0%} of the time; they can use {need:,.0f} images/s, and one "
            f"process makes {rate:,.0f}."
        )
        return number

    def _restart(self, now: float, made: WorkerTimes) -> None:
        self._begun = now
        self._batches = 0
        self._samples = 0
        self._waited = 0.0
        self._before = made
