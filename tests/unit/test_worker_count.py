"""The measured number of decode processes, from made-up times of steps and decoders."""

from __future__ import annotations

import pytest

from paceline.data.decoding.chunk_queue import WorkerTimes
from paceline.data.decoding.worker_count import WorkerCount


class Run:
    """Steps of 256 samples that compute for 60 ms, fed by decoders of 480 samples a second each."""

    def __init__(self, limit: int, *, compute: float = 0.06, rate: float = 480.0) -> None:
        self.count = WorkerCount(limit, clock=lambda: self.now)
        self.now = 0.0
        self.workers = 0
        self._compute, self._rate = compute, rate
        self._made = 0

    def steps(self, number: int) -> list[int]:
        """Train steps; return the numbers of processes that were chosen."""
        chosen = []
        for _ in range(number):
            supply = self._rate * max(1, self.workers)  # a thread, as long as there is no process
            seconds = max(self._compute, 256 / supply)
            self.now += seconds
            self._made += 256
            made = WorkerTimes(samples=self._made, busy=self._made / self._rate, runnable=0.0)
            wanted = self.count.batch(256, seconds - self._compute, made, self.workers)
            if wanted is not None:
                self.workers = wanted
                chosen.append(wanted)
        return chosen


def test_so_many_processes_decode_that_the_step_does_not_wait() -> None:
    run = Run(15)
    assert run.steps(100) == [10]  # 256 / 0.06 s = 4,267 a second, and a tenth: 9.8 times 480
    assert run.count.reason == (
        "Decoding in 10 processes, of at most 15: steps waited for images 89% of the time; they "
        "can use 4,267 images/s, and one process makes 480."
    )


def test_there_are_no_more_than_the_limit() -> None:
    run = Run(4)
    assert run.steps(100) == [4]


@pytest.mark.parametrize("limit", [0, 15])
def test_a_step_that_does_not_wait_starts_none(limit: int) -> None:
    run = Run(limit, compute=1.0, rate=400.0)
    assert run.steps(200) == []


def test_a_short_run_starts_none() -> None:
    assert Run(15).steps(4) == []  # two seconds: a start costs as much


def test_a_number_that_is_too_small_becomes_larger() -> None:
    run = Run(15)
    run.steps(100)
    run._compute = 0.03  # the model's later layers are frozen, say
    run.steps(100)
    assert run.workers == 15


def test_waits_that_processes_do_not_shorten_add_one_at_a_time() -> None:
    count = WorkerCount(3, clock=lambda: now[0])
    now, chosen = [0.0], []
    for step in range(40):
        now[0] += 1.0
        made = WorkerTimes(samples=8 * step, busy=0.001 * step, runnable=0.0)
        wanted = count.batch(8, 0.5, made, chosen[-1] if chosen else 0)
        chosen += [] if wanted is None else [wanted]
    assert chosen == [1, 2, 3]
