"""Simulator of a step's schedules: how soon can a step end, by its layers' times and the link's?

A step, from the beginning of its backward to the next one's, on one rank; all ranks are alike:

    training    backward ───────────────┤ wait │ update a │ forward a │ update b │ forward b … ┤
    gradients            c ▲    b ▲   a ▲      ▲                      ▲
    link                   └ c ───┬ b ──┬ a ───┘ b (the rest) ────────┘ c (the rest) …

- A parameter's gradient is complete at a time of the backward, `ready`. Its reduce-scatter and
  all-gather move 2 (n - 1) / n times its bytes each way on the link of each of n ranks, which takes
  `link_seconds`. The link has one rate and no latency, and moves both ways at once.
- The forward reads a parameter at a time of its own, `read`, and waits there until the exchange has
  ended. The update runs there, too: it takes the same time for each byte of parameters.
- An exchange may be interrupted at any byte by a more urgent one, at no cost.

With q[i] the time from the read of parameter i to the forward's end, updates from i on included,
and C[i] the end of its exchange, the step takes max(compute, max over i of C[i] + q[i]), where
compute is backward + update + forward. All parameters are read before the next backward begins, so
no exchange reaches into the next step, and all steps are alike. The least of it over all orders is
the problem 1 | r, pmtn | Lmax, whose solution is known (Jackson's rule): of all that is ready,
always exchange what is read first. That is the *dependency floor*. It is never below compute, nor
below the link's time for all bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter tensor.

    Attributes:
        nbytes: its bytes, and its gradient's.
        ready: seconds from the backward's beginning until its gradient is complete.
        read: seconds from the forward's beginning until it is first read, if there is no wait.
    """

    nbytes: int
    ready: float
    read: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A step's computation.

    Attributes:
        forward: its seconds.
        backward: its seconds, the loss included.
        update: seconds of the optimizer's step over all parameters.
        parameters: all that are trained.
    """

    forward: float
    backward: float
    update: float
    parameters: tuple[Parameter, ...]

    @property
    def compute(self) -> float:
        """Seconds of a step that exchanges nothing."""
        return self.forward + self.backward + self.update

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(p.nbytes for p in self.parameters)


Buckets = Sequence[Sequence[int]]
"""Numbers of the parameters that are exchanged together, a sequence each bucket."""


def link_seconds(nbytes: int, ranks: int, gbit: float) -> float:
    """Return for how many seconds an all-reduce keeps each rank's link busy, both ways at once."""
    return 8 * 2 * (ranks - 1) / ranks * nbytes / gbit / 1e9


def floor(profile: Profile, ranks: int, gbit: float) -> float:
    """Return the dependency floor, in seconds a step: each parameter is exchanged by itself."""
    return bucketed(profile, [[i] for i in range(len(profile.parameters))], ranks, gbit)


def bucketed(profile: Profile, buckets: Buckets, ranks: int, gbit: float) -> float:
    """Return seconds a step if parameters are exchanged in buckets, those read sooner first.

    A bucket is ready when all its gradients are. Its parameters are updated when the first of them
    is read.
    """
    members = [[profile.parameters[i] for i in bucket] for bucket in buckets]
    members.sort(key=lambda bucket: min(p.read for p in bucket))
    ready = [max(p.ready for p in bucket) for bucket in members]
    seconds = [link_seconds(sum(p.nbytes for p in b), ranks, gbit) for b in members]
    ends = exchange_ends(ready, seconds, range(len(members)))
    return step_seconds(profile, members, ends)


def barrier(profile: Profile, ranks: int, gbit: float) -> float:
    """Return seconds a step if all exchanges end before the update: the best of what DDP can do.

    Gradients are exchanged one by one during the backward, without buckets.
    """
    ready = [p.ready for p in profile.parameters]
    seconds = [link_seconds(p.nbytes, ranks, gbit) for p in profile.parameters]
    ends = exchange_ends(ready, seconds, range(len(ready)))  # the last end is any order's
    return max(profile.backward, *ends) + profile.update + profile.forward


def no_overlap(profile: Profile, ranks: int, gbit: float) -> float:
    """Return seconds a step if the exchange begins after the backward, and the update after it."""
    return profile.compute + link_seconds(profile.nbytes, ranks, gbit)


def exchange_ends(
    ready: Sequence[float], seconds: Sequence[float], priorities: Sequence[int]
) -> list[float]:
    """Return when each exchange ends on a link that always serves the most urgent ready one.

    Args:
        ready: when each may begin.
        seconds: for how long each keeps the link busy.
        priorities: the smallest number is the most urgent.
    """
    left, ends, now = dict(enumerate(seconds)), [inf] * len(ready), 0.0
    while left:
        now = max(now, min(ready[i] for i in left))
        urgent = min((i for i in left if ready[i] <= now), key=lambda i: priorities[i])
        until = min((ready[i] for i in left if ready[i] > now), default=inf)
        if now + left[urgent] <= until:
            now += left.pop(urgent)
            ends[urgent] = now
        else:
            left[urgent] -= until - now
            now = until
    return ends


def step_seconds(
    profile: Profile, buckets: Sequence[Sequence[Parameter]], ends: Sequence[float]
) -> float:
    """Return seconds a step, by when each bucket's exchange ends.

    Args:
        profile: the step.
        buckets: in the order in which the forward first reads them.
        ends: seconds from the backward's beginning, one a bucket.
    """
    now, before = profile.backward, 0.0
    for bucket, end in zip(buckets, ends, strict=True):
        read = min(p.read for p in bucket)
        now = max(now + read - before, end)
        now += profile.update * sum(p.nbytes for p in bucket) / profile.nbytes
        before = read
    return now + profile.forward - before
