"""The ranks' trace buffers as one trace in Chrome's format, as PyTorch's profiler writes it.

A rank is a process, its threads are `main`, `owner` (which reduces shards) and `network`. A put is
a slice in the thread that queues it, another where it has left and one on the peer where it has
arrived; a flow (an arrow) joins the three. https://ui.perfetto.dev and chrome://tracing open
the file.

Format: "Trace Event Format", Google; times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.timeline.recorder_buffer import RecorderBuffer, Span, TracedPut

_THREADS = {"MainThread": "main", "owner": "owner", "network": "network"}
_INSTANT = 0.001  # µs; a flow begins and ends at slices
_Event = dict[str, Any]
_Put = tuple[int, int, int, int, int]  # window, from, to, notification, value


def chrome_trace(buffers: Sequence[RecorderBuffer], offsets: Sequence[int]) -> dict[str, Any]:
    """Join trace buffers, in rank order, on rank 0's clock.

    Args:
        buffers: of all ranks.
        offsets: what to add to each one's times, in nanoseconds.
    """
    begins = [
        span.start + offset
        for buffer, offset in zip(buffers, offsets, strict=True)
        for span in buffer.spans
    ]
    base = min(begins, default=0)
    puts = {
        put: number
        for number, put in enumerate(
            _put(buffer, span) for buffer in buffers for span in buffer.spans if span.name == "put"
        )
    }
    events: list[_Event] = []
    for buffer, offset in zip(buffers, offsets, strict=True):
        events += _Rank(buffer, offset - base, puts).events()
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "distributedInfo": {"world_size": len(buffers)},
        "traceEvents": events,
    }


class _Rank:
    """Converter of one rank's trace to Chrome trace events.

    Args:
        buffer: the rank's trace buffer.
        shift: nanoseconds to add to the rank's times.
        puts: for each put of any rank, its id (flow number).
    """

    def __init__(self, buffer: RecorderBuffer, shift: int, puts: dict[_Put, int]) -> None:
        self._buffer = buffer
        self._shift = shift
        self._puts = puts
        threads = dict.fromkeys([*_THREADS, *(span.thread for span in buffer.spans)])
        self._tids = {thread: number for number, thread in enumerate(threads)}

    def events(self) -> Iterator[_Event]:
        """Yield the names of process and threads, spans, moments, and the flows between them."""
        yield from self._names()
        for span in self._buffer.spans:
            yield {
                "ph": "X",
                "cat": span.name,
                "name": self._title(span),
                **self._at(span.start, span.thread),
                "dur": (span.stop - span.start) / 1e3,
                "args": {**span.fields, **self._parameters(span)},
            }
            if span.name == "put":
                yield self._flow("s", self._puts[_put(self._buffer, span)], span.start, span.thread)
        for moment in self._buffer.moments:
            yield from self._moment(moment)

    def _names(self) -> Iterator[_Event]:
        rank = self._buffer.rank
        text = f"rank {rank} (machine {self._buffer.machine})"
        yield self._meta("process_name", 0, name=text)
        yield self._meta("process_sort_index", 0, sort_index=rank)
        for thread, tid in self._tids.items():
            yield self._meta("thread_name", tid, name=_THREADS.get(thread, thread))
            yield self._meta("thread_sort_index", tid, sort_index=tid)

    def _meta(self, kind: str, tid: int, **args: object) -> _Event:
        return {"ph": "M", "name": kind, "pid": self._buffer.rank, "tid": tid, "args": args}

    def _parameters(self, span: Span) -> dict[str, object]:
        """Name what a span's bucket holds."""
        bucket = span.fields.get("bucket")
        known = self._buffer.buckets
        return {"parameters": known[bucket]} if bucket is not None and bucket < len(known) else {}

    def _moment(self, moment: TracedPut) -> Iterator[_Event]:
        """Yield a moment of a traced put."""
        rank = self._buffer.rank
        peer = moment.peer
        ends = (peer, rank) if moment.arrived else (rank, peer)
        number = self._puts.get((moment.window, *ends, moment.notification, moment.value))
        if number is None:
            return
        cat, way = ("arrived", "from") if moment.arrived else ("sent", "to")
        yield {
            "ph": "X",
            "cat": cat,
            "name": f"{cat}: {self._what(moment.window, moment.notification)} {way} rank {peer}",
            **self._at(moment.at, "network"),
            "dur": _INSTANT,
            "args": moment._asdict(),
        }
        yield self._flow("f" if moment.arrived else "t", number, moment.at, "network")

    def _flow(self, phase: str, number: int, at: int, thread: str) -> _Event:
        end = {"bp": "e"} if phase == "f" else {}
        event = {"ph": phase, "cat": "put", "name": "put", "id": number}
        return {**event, **self._at(at, thread), **end}

    def _at(self, time: int, thread: str) -> _Event:
        ts = (time + self._shift) / 1e3
        return {"ts": ts, "pid": self._buffer.rank, "tid": self._tids[thread]}

    def _title(self, span: Span) -> str:
        fields = span.fields
        if span.name in ("put", "wait for rank"):
            what = self._what(fields["window"], fields["notification"])
            verb, way = ("put", "to") if span.name == "put" else ("wait for", "from")
            return f"{verb} {what} {way} rank {fields['peer']}"
        if span.name == "step":
            return f"step {fields['step']}"
        return f"{span.name}: bucket {fields['bucket']}" if "bucket" in fields else span.name

    def _what(self, window: int, notification: int) -> str:
        names = self._buffer.names.get(window, ())
        known = notification < len(names)
        return names[notification] if known else f"notification {notification}"


def _put(buffer: RecorderBuffer, span: Span) -> _Put:
    fields = span.fields
    return (fields["window"], buffer.rank, fields["peer"], fields["notification"], fields["value"])
