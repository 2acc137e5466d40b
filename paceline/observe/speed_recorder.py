"""Recorder of the run's present speed, for a thread that reports it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.observe.progress_rate import ProgressRate
from paceline.recorder import NullRecorder

_LOOK_S = 1.0  # between two looks at the number of samples


class SpeedRecorder(NullRecorder):
    """Recorder that measures the samples per second of the last seconds.

    Args:
        clock: returns seconds since an arbitrary origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # over the rate: the main thread counts, another one reads
        self._rate: ProgressRate | None = None
        self._looked = 0.0

    def event(self, name: str, **fields: Any) -> None:
        """Count the samples of a step; leave an evaluation out of the speed."""
        if name not in ("step", "evaluate"):
            return
        now = self._clock()
        with self._lock:
            if self._rate is None:
                self._rate = ProgressRate(now)
                self._looked = now
            elif name == "evaluate":
                self._rate.pause(now)
            else:
                cuts = fields["cuts"]
                self._rate.step(cuts[-1] - cuts[0], now)
                # A look each second leaves a mark, so that
                # the window slides even where nothing asks.
                if now - self._looked >= _LOOK_S:
                    self._looked = now
                    self._rate.samples_per_second(now)

    def samples_per_second(self) -> float | None:
        """Return the recent speed of all ranks together; None before the second step."""
        with self._lock:
            return None if self._rate is None else self._rate.samples_per_second(self._clock())
