"""Timeline of a rank: spans of all its threads on one clock, and the account of each step.

    step      │ wait for input │ boundary │ train                                                │
    train     │ wait b3 │ forward … │ wait b0 │ forward │ backward ─ send ─ send │ end │
    compute             └───────────┘         └── all that is none of the others ────┘

The times of an account are those of the training thread. *Exposed* communication is the time for
which it waited for the exchange; the rest overlapped with computation. On a GPU under NCCL the
device waits, which isn't measured here.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar

from paceline.comm.window import PutEvent
from paceline.timeline.recorder_buffer import Span, TracedPut

WAIT_FOR_INPUT = "wait for input"
WAIT_FOR_LAYERS = "wait for layers"
WAIT_FOR_STAGES = "wait for stages"
WAIT_FOR_SUMMARY = "wait for summary"
WAIT_AT_BARRIER = "wait at barrier"
READS = "reads"  # count of buckets whose version may be behind
BEHIND = "versions behind"  # the sum over these
SETTLE = "settle"  # between steps; it has waits
_FOR_PEERS = ("wait", WAIT_FOR_LAYERS, WAIT_FOR_STAGES, WAIT_FOR_SUMMARY, WAIT_AT_BARRIER)
_APART = frozenset(("wait", "send", "update", "snapshot", "check"))  # from the span around them
_AROUND = frozenset(("boundary", "train"))
_SUMMED = (*_APART, *_AROUND, *_FOR_PEERS, WAIT_FOR_INPUT, SETTLE)
_SHORTEST = 0.2  # ms of a wait that is reported; measuring costs time, too
_END = object()  # behind the last item
_FIELDS = {  # of an account, and the spans that they sum
    "compute_ms": "train",
    "exposed_ms": "wait",
    "send_ms": "send",
    "update_ms": "update",
    "snapshot_ms": "snapshot",
    "check_ms": "check",
    "boundary_ms": "boundary",
}
_Item = TypeVar("_Item")


class PutEvents(Protocol):
    """Protocol of a window that remembers when its puts left and arrived."""

    @property
    def moments(self) -> Iterable[PutEvent]:
        """The moments of the newest puts, in the order of their times."""


class Timeline:
    """Timeline of a rank: measures spans and counts, and retains the spans of some steps.

    Its sums are those of the training thread. Spans of other threads have names of their own, which
    aren't summed: they are only retained.

    Args:
        clock: returns nanoseconds of the system's monotonic clock.

    Attributes:
        windows: for each window that is followed, what remembers its puts.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock = clock
        self.windows: dict[int, PutEvents] = {}
        self._sums = dict.fromkeys(_SUMMED, 0)  # ns of the ended spans, by name
        self._apart = 0  # ns, of those in `_APART`
        self._step: int | None = None  # the present one; None: no step runs
        self._trained: int | None = None  # the step whose `train` has ended last
        self._before = dict(self._sums)  # at the last account
        self._waits: dict[object, int] = defaultdict(int)  # ns since then, by bucket
        self._counts: dict[str, float] = defaultdict(float)  # since then
        self._steps = range(0)  # those whose spans are retained
        self._spans: dict[int, list[Span]] = {}  # by step
        self._present: list[Span] | None = None  # the present step's; None: they aren't retained

    def span(self, name: str, **fields: object) -> _Span:
        """Measure a `with` block.

        Args:
            name: what the time is spent on. The span `step` has the field `step`, and `wait` the
                field `bucket`.
            fields: what is known about it, for a trace.
        """
        return _Span(self, name, fields)

    def each(self, name: str, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield items, the wait for each of them in a span."""
        iterator = iter(items)
        while True:
            with self.span(name):
                following = next(iterator, _END)
            if following is _END:
                return
            yield following  # type: ignore[misc]

    def count(self, name: str, amount: float) -> None:
        """Add to a count of the present step."""
        self._counts[name] += amount

    def in_step(self, operation: str) -> str:
        """Return the name of an operation for errors, with the present step if there is one."""
        return operation if self._step is None else f"{operation} in step {self._step}"

    def now(self) -> float:
        """Return seconds of the system's monotonic clock."""
        return self.clock() / 1e9

    def own_seconds(self) -> float:
        """Return seconds since an arbitrary origin, without this rank's waits for its peers."""
        return (self.clock() - sum(self._sums[name] for name in _FOR_PEERS)) / 1e9

    def seconds(self, name: str) -> float:
        """Return the sum of the training thread's ended spans of a name, in seconds."""
        return self._sums[name] / 1e9

    def account(self, step: int) -> dict[str, object]:
        """Return where the time of the step that was trained last went, for its event; once.

        Returns:
            {} if another step's `train` ended last, or the account was returned before; else:
            compute_ms: the time of the span `train` without the five kinds of time that follow.
            exposed_ms: time spent waiting for the exchange, in this step and, as all that follows,
                since the step before.
            send_ms: time spent handing gradients over to the exchange.
            update_ms: time spent updating parameters.
            snapshot_ms: time spent copying the state for a snapshot in memory.
            check_ms: time spent summing the state for the replica check.
            boundary_ms: time before `train` that isn't in one of these: waits for the summaries of
                earlier steps, say.
            wait_input_ms: time spent waiting for the step's samples, where it is measured.
            waits_ms: time spent waiting for each bucket, by bucket number; waits below 0.2 ms are
                left out.
            sent, received: number of bytes that the exchange sent and received.
            staleness: the mean number of versions by which what was read was behind, where that
                may be above 0.
        """
        if self._trained != step:
            return {}
        sums = self._sums
        before = self._before
        fields: dict[str, object] = {
            field: _ms(sums[name] - before[name]) for field, name in _FIELDS.items()
        }
        if sums[WAIT_FOR_INPUT] != before[WAIT_FOR_INPUT]:
            fields["wait_input_ms"] = _ms(sums[WAIT_FOR_INPUT] - before[WAIT_FOR_INPUT])
        waits = {str(bucket): _ms(spent) for bucket, spent in self._waits.items()}
        fields["waits_ms"] = {bucket: ms for bucket, ms in waits.items() if ms >= _SHORTEST}
        fields["sent"] = round(self._counts["sent"])
        fields["received"] = round(self._counts["received"])
        if reads := self._counts[READS]:
            fields["staleness"] = round(self._counts[BEHIND] / reads, 3)
        self._trained = None
        self._before = dict(sums)
        self._waits.clear()
        self._counts.clear()
        return fields

    def retain(self, steps: range) -> None:
        """Retain the spans of some steps, counted from the run's first (0); forget all others."""
        self._steps = steps
        self._spans = {}
        self._present = None

    @property
    def traced(self) -> bool:
        """Whether the spans of any step are retained."""
        return bool(self._steps)

    def spans(self, steps: range) -> Sequence[Span]:
        """Return the retained spans of steps, and of what follows each of them.

        Those of a thread are in the order in which they ended.
        """
        return [*chain.from_iterable(self._spans.get(step, ()) for step in steps)]

    def follow(self, window: int, puts: PutEvents) -> None:
        """Let `puts` return the moments of a window's puts, which its event loop records."""
        self.windows[window] = puts

    def puts(self) -> list[TracedPut]:
        """Return the moments of the followed windows' puts."""
        return [
            TracedPut(number, *moment)
            for number, window in self.windows.items()
            for moment in window.moments
        ]


class _Span:
    """Context manager that measures its block."""

    __slots__ = ("_apart", "_began", "_fields", "_name", "_timeline")

    def __init__(self, timeline: Timeline, name: str, fields: Mapping[str, Any]) -> None:
        self._timeline = timeline
        self._name = name
        self._fields = fields

    def __enter__(self) -> None:
        timeline = self._timeline
        name = self._name
        if name in _AROUND:
            self._apart = timeline._apart
        elif name == "step":
            self._begin_step(self._fields["step"])
        self._began = timeline.clock()

    def __exit__(self, *_: object) -> None:
        timeline = self._timeline
        name = self._name
        now = timeline.clock()
        spent = now - self._began
        if name in _APART:
            timeline._apart += spent
            timeline._sums[name] += spent
            if name == "wait":
                timeline._waits[self._fields["bucket"]] += spent
        elif name in _AROUND:
            timeline._sums[name] += spent - (timeline._apart - self._apart)
            if name == "train":
                timeline._trained = timeline._step
        elif name == "step":
            timeline._step = None
        elif name in timeline._sums:
            timeline._sums[name] += spent
        if timeline._present is not None:
            thread = threading.current_thread().name
            timeline._present.append(Span(name, thread, self._began, now, self._fields))

    def _begin_step(self, step: int) -> None:
        timeline = self._timeline
        timeline._step = step
        timeline._present = (
            timeline._spans.setdefault(step, []) if step in timeline._steps else None
        )


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 2)
