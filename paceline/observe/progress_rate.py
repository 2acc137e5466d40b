"""How fast a run is and how long it still takes, from the times at which it was looked at."""

from __future__ import annotations

from collections import deque

WINDOW = 10.0  # seconds over which speed is averaged


class ProgressRate:
    """Progress meter: the recent speed, and the remaining time at the average speed.

    Args:
        now: the start of the run, in seconds since an arbitrary origin.
    """

    def __init__(self, now: float) -> None:
        self._samples = 0
        self._steps = 0
        # (time, samples until then): the speed is that since the first of them
        self._marks: deque[tuple[float, int]] = deque([(now, 0)])
        self._first_step: float | None = None

    def step(self, samples: int, now: float) -> None:
        """Count a finished step."""
        self._samples += samples
        self._steps += 1
        if self._first_step is None:
            self._first_step = now

    def pause(self, now: float) -> None:
        """Leave what came before, such as an evaluation, out of the speed from now on."""
        self._marks.clear()
        self._marks.append((now, self._samples))

    def samples_per_second(self, now: float) -> float:
        """Average over the last `WINDOW` seconds, or since the last look where that is longer."""
        while len(self._marks) > 1 and now - self._marks[1][0] >= WINDOW:
            self._marks.popleft()
        then, samples = self._marks[0]
        self._marks.append((now, self._samples))
        return (self._samples - samples) / (now - then) if now > then else 0.0

    def seconds_left(self, steps: int, now: float) -> float | None:
        """Estimate how long `steps` more take, evaluations included; None if it is unknown.

        The first step doesn't count: it starts up what is slow to start.
        """
        # Time counts from the end of the first step, which
        # compiles and warms up, and so has one step less.
        if self._first_step is None or self._steps < 2:
            return None
        return (now - self._first_step) / (self._steps - 1) * steps


def duration(seconds: float) -> str:
    """Write a time as h:mm:ss or m:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
