"""Where a step's time went on this rank, and what it exchanged; told with the step's event.

    step     │ wait b3 │ forward … │ wait b0 │ forward │ backward ─ send ─ send │ end │
    compute            └───────────┘         └──── all that is none of the others ────┘

Times are those of the rank's own thread. *Exposed* communication is what it waited for others:
the rest of the exchange went on behind its back. On a GPU under NCCL a wait is the device's, and
isn't seen here.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from paceline.recorder import NullRecorder, Recorder

_EXCHANGE = ("wait", "send", "update")
_WORTH_TELLING = 0.2  # ms; looking takes something, too


class StepAccount:
    """Stands before the run's recorder: adds spans and counts up, and tells them with each step.

    What an event `step` gets besides, where the step was in a span `train`:
        compute_ms: what the step took, without the following three.
        exposed_ms: what it, and who settled since the step before, waited for the exchange.
        send_ms, update_ms: what it took to hand gradients over, and to update parameters.
        waits_ms: of each bucket that was waited for 0.2 ms or more, by its number, how long.
        sent, received: bytes.

    Args:
        recorder: the run's.
        trace: gets all spans, too.
        clock: nanoseconds since any moment.
    """

    def __init__(
        self,
        recorder: Recorder,
        trace: Recorder | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._recorder, self._trace, self._clock = recorder, trace or NullRecorder(), clock
        self._traced = trace is not None
        self._spent: dict[str, int] = defaultdict(int)  # ns, by a span's name
        self._waits: dict[object, int] = defaultdict(int)  # ns, by bucket
        self._counts: dict[str, float] = defaultdict(float)
        self._before = 0  # of the exchange's, ns, when the step began
        self._compute: int | None = None

    def span(self, name: str, **fields: object) -> AbstractContextManager[None]:
        """Add the block's time to others of that name."""
        own = _Span(self, name, fields)
        return _Both(own, self._trace.span(name, **fields)) if self._traced else own

    def count(self, name: str, amount: float) -> None:
        """Add to a count."""
        self._counts[name] += amount

    def event(self, name: str, **fields: Any) -> None:
        """Pass an event on, a step's with its account."""
        told = self._take() if name == "step" and self._compute is not None else {}
        self._recorder.event(name, **fields, **told)
        self._trace.event(name, **fields)

    def close(self) -> None:
        """Close both recorders."""
        with ExitStack() as closing:
            closing.callback(self._recorder.close)
            closing.callback(self._trace.close)

    def began(self, name: str) -> int:
        """Take note of a span's begin; return the time."""
        if name == "train":
            self._before = self._exchanged
        return self._clock()

    def ended(self, name: str, fields: dict[str, object], began: int) -> None:
        """Add a span up."""
        spent = self._clock() - began
        if name == "train":
            self._compute = spent - (self._exchanged - self._before)
            return
        self._spent[name] += spent
        if name == "wait":
            self._waits[fields["bucket"]] += spent

    @property
    def _exchanged(self) -> int:
        return sum(self._spent[name] for name in _EXCHANGE)

    def _take(self) -> dict[str, object]:
        assert self._compute is not None
        wait, send, update = (_ms(self._spent[name]) for name in _EXCHANGE)
        told = {
            "compute_ms": _ms(self._compute),
            "exposed_ms": wait,
            "send_ms": send,
            "update_ms": update,
            "waits_ms": {
                str(bucket): ms
                for bucket, spent in self._waits.items()
                if (ms := _ms(spent)) >= _WORTH_TELLING
            },
            "sent": round(self._counts["sent"]),
            "received": round(self._counts["received"]),
        }
        self._compute = None
        for sums in (self._spent, self._waits, self._counts):
            sums.clear()
        return told


class _Span:
    """A block whose time an account adds up."""

    __slots__ = ("_account", "_began", "_fields", "_name")

    def __init__(self, account: StepAccount, name: str, fields: dict[str, object]) -> None:
        self._account, self._name, self._fields = account, name, fields

    def __enter__(self) -> None:
        self._began = self._account.began(self._name)

    def __exit__(self, *_: object) -> None:
        self._account.ended(self._name, self._fields, self._began)


class _Both:
    """A block that two measure."""

    def __init__(
        self, one: AbstractContextManager[None], other: AbstractContextManager[None]
    ) -> None:
        self._one, self._other = one, other

    def __enter__(self) -> None:
        self._one.__enter__()
        self._other.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._other.__exit__(*error)
        self._one.__exit__(*error)


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 2)
