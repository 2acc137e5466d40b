"""Model of a step's schedule: its seconds, by its layers' times, its buckets and the link.

A step, from the beginning of its backward to the next one's, on one rank; all ranks are alike:

    training    backward ───────────────┤ wait │ update a │ forward a │ update b │ forward b … ┤
    gradients            c ▲    b ▲   a ▲      ▲                      ▲
    link                   └ c ───┬ b ──┬ a ───┘ b (the rest) ────────┘ c (the rest) …

- A parameter's gradient is complete at a time of the backward, `ready`. The forward reads the
  parameter at a time of its own, `read`, and waits there until the exchange of its bucket has
  ended. The update runs there, too: it takes the same time for each byte of parameters.
- A bucket's exchange may begin when all its gradients are complete. It keeps the link busy for a
  time that is proportional to its bytes.
- The link serves one bucket at a time. A more urgent one interrupts it, at any byte and at no cost.

A step may also await all sums before its update, to clip gradients, say (`Profile.reduces`). Then
nothing of the exchange overlaps the forward.

All parameters are read before the next backward begins, so no exchange reaches into the next step,
and all steps are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """Times and size of a parameter tensor.

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
    """Times of a step's computation.

    Attributes:
        forward: its seconds.
        backward: its seconds, the loss included.
        update: seconds of the optimizer's step over all parameters; 0 where the forward has them.
        parameters: all that are trained.
        reduces: all sums are awaited before the update.
    """

    forward: float
    backward: float
    update: float
    parameters: tuple[Parameter, ...]
    reduces: bool = False

    @property
    def compute(self) -> float:
        """Seconds of a step that exchanges nothing."""
        return self.forward + self.backward + self.update

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(p.nbytes for p in self.parameters)

    def beside(self, work: float) -> Profile:
        """Return the profile of a processor that does so many seconds of other work meanwhile."""
        factor = 1 + work / self.compute
        parameters = (
            replace(p, ready=factor * p.ready, read=factor * p.read) for p in self.parameters
        )
        return replace(
            self,
            forward=factor * self.forward,
            backward=factor * self.backward,
            update=factor * self.update,
            parameters=tuple(parameters),
        )


Buckets = Sequence[Sequence[int]]
"""Indices of the parameters that are exchanged together, a sequence each bucket."""


def seconds_by_urgency(profile: Profile, buckets: Buckets, seconds_per_byte: float) -> float:
    """Return seconds a step if of the complete buckets the one that is read soonest is sent first.

    A bucket's parameters are updated when the first of them is read.
    """
    return _step(profile, buckets, seconds_per_byte, urgent=True)


def seconds_in_order(profile: Profile, buckets: Buckets, seconds_per_byte: float) -> float:
    """Return seconds a step if buckets are sent in the order in which they are complete."""
    return _step(profile, buckets, seconds_per_byte, urgent=False)


def exchange_ends(
    ready: Sequence[float], seconds: Sequence[float], priorities: Sequence[float]
) -> list[float]:
    """Return when each exchange ends on a link that always serves the most urgent ready one.

    Args:
        ready: when each may begin.
        seconds: for how long each keeps the link busy.
        priorities: the smallest number is the most urgent.
    """
    left = dict(enumerate(seconds))
    ends = [inf] * len(ready)
    now = 0.0
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
        buckets: in the order in which the forward first reads them.
        ends: seconds from the backward's beginning, one a bucket.
    """
    now = profile.backward
    before = 0.0
    for bucket, end in zip(buckets, ends, strict=True):
        read = min(p.read for p in bucket)
        now = max(now + read - before, end)
        now += profile.update * sum(p.nbytes for p in bucket) / profile.nbytes
        before = read
    return now + profile.forward - before


def _step(profile: Profile, buckets: Buckets, seconds_per_byte: float, *, urgent: bool) -> float:
    members = [[profile.parameters[i] for i in bucket] for bucket in buckets]
    members.sort(key=lambda bucket: min(p.read for p in bucket))
    ready = [max(p.ready for p in bucket) for bucket in members]
    seconds = [seconds_per_byte * sum(p.nbytes for p in bucket) for bucket in members]
    ends = exchange_ends(ready, seconds, range(len(members)) if urgent else ready)
    if profile.reduces:
        return max(profile.backward, *ends) + profile.update + profile.forward
    return step_seconds(profile, members, ends)
