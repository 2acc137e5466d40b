"""Where a step's time went on this rank, and its traffic: the measured fields of `step` events.

    step     │ wait b3 │ forward … │ wait b0 │ forward │ backward ─ send ─ send │ end │
    compute            └───────────┘         └──── all that is none of the others ────┘

Times are those of the rank's own thread. *Exposed* communication is the time that it waited for the
exchange; the rest overlapped with computation. On a GPU under NCCL the device waits, which isn't
measured here.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from paceline.recorder import Recorder

_APART = ("wait", "send", "update", "snapshot", "check")  # spans that aren't counted as computation
_SHORTEST = 0.2  # ms of a wait that is reported; measuring costs time, too


class StepAccount:
    """Recorder that sums the spans and the counts of each step, and passes all events on.

    It adds the sums to the step's event before it passes that event on.

    Fields that it adds to an event `step`, if the step was in a span `train`:
        compute_ms: the step's time without exposed_ms, send_ms, update_ms, snapshot_ms, check_ms.
        exposed_ms: time spent waiting for the exchange in this step and in calls of `settle` since
            the previous step.
        send_ms: time spent handing gradients over to the exchange.
        update_ms: time spent updating parameters.
        snapshot_ms: time spent copying the state for a snapshot in memory, in this step and since
            the previous one.
        check_ms: time spent summing the state for the replica check, likewise.
        waits_ms: time spent waiting for each bucket, by bucket number; waits below 0.2 ms are left
            out.
        sent, received: number of bytes that the exchange sent and received.

    Args:
        recorders: the run's recorders; each event is passed to them in the order given here, and
            `close` closes them.
        trace: recorder of the trace, which receives all spans and events, and is closed by `close`.
        clock: returns nanoseconds since an arbitrary origin.
    """

    def __init__(
        self,
        *recorders: Recorder,
        trace: Recorder | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._recorders = recorders
        self._trace = trace
        self._clock = clock
        self._spent: dict[str, int] = defaultdict(int)  # ns, by a span's name
        self._waits: dict[object, int] = defaultdict(int)  # ns, by bucket
        self._counts: dict[str, float] = defaultdict(float)
        self._before = 0  # of those apart, ns, when the step began
        self._compute: int | None = None

    def span(self, name: str, **fields: object) -> AbstractContextManager[None]:
        """Add the block's time to others of that name."""
        traced = self._trace.span(name, **fields) if self._trace else None
        return _Span(self, name, fields, traced)

    def count(self, name: str, amount: float) -> None:
        """Add to a count."""
        self._counts[name] += amount

    def event(self, name: str, **fields: Any) -> None:
        """Pass an event on, a step's with its account."""
        sums = self._take() if name == "step" and self._compute is not None else {}
        for recorder in self._recorders:
            recorder.event(name, **fields, **sums)
        if self._trace:
            self._trace.event(name, **fields)

    def close(self) -> None:
        """Close all recorders, also where one fails; its error is raised in the end."""
        with ExitStack() as closing:
            for recorder in (*filter(None, [self._trace]), *reversed(self._recorders)):
                closing.callback(recorder.close)

    @property
    def _spent_apart(self) -> int:
        return sum(self._spent[name] for name in _APART)

    def _take(self) -> dict[str, object]:
        assert self._compute is not None
        wait, send, update, snapshot, check = (_ms(self._spent[name]) for name in _APART)
        sums = {
            "compute_ms": _ms(self._compute),
            "exposed_ms": wait,
            "send_ms": send,
            "update_ms": update,
            "snapshot_ms": snapshot,
            "check_ms": check,
            "waits_ms": {
                str(bucket): ms
                for bucket, spent in self._waits.items()
                if (ms := _ms(spent)) >= _SHORTEST
            },
            "sent": round(self._counts["sent"]),
            "received": round(self._counts["received"]),
        }
        self._compute = None
        for counter in (self._spent, self._waits, self._counts):
            counter.clear()
        return sums


class _Span:
    """Context manager that adds its duration to an account, and may also record a traced span."""

    __slots__ = ("_account", "_began", "_fields", "_name", "_traced")

    def __init__(
        self,
        account: StepAccount,
        name: str,
        fields: dict[str, object],
        traced: AbstractContextManager[None] | None,
    ) -> None:
        self._account = account
        self._name = name
        self._fields = fields
        self._traced = traced

    def __enter__(self) -> None:
        account = self._account
        if self._name == "train":
            account._before = account._spent_apart
        self._began = account._clock()
        if self._traced:
            self._traced.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._traced:
            self._traced.__exit__(*error)
        account = self._account
        name = self._name
        spent = account._clock() - self._began
        if name == "train":
            account._compute = spent - (account._spent_apart - account._before)
            return
        account._spent[name] += spent
        if name == "wait":
            account._waits[self._fields["bucket"]] += spent


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 2)
