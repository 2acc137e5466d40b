"""A supervisor's queue: nothing that comes is lost, and a signal always wakes its reader."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.supervision.event_queue import (
    EventQueue,
    Exited,
    Interrupted,
)


@pytest.fixture
def events() -> Iterator[EventQueue]:
    with closing(EventQueue()) as made:
        yield made


def test_events_come_in_the_order_they_were_put(events: EventQueue) -> None:
    put = [Exited(local_rank=rank, returncode=0) for rank in range(1000)]
    for event in put:
        events.put(event)
    assert [events.get() for _ in put] == put
    assert events.get(timeout=0) is None


def test_a_thread_wakes_the_reader(events: EventQueue) -> None:
    thread = threading.Thread(target=events.put, args=("hello",))
    thread.start()
    assert events.get(timeout=30) == "hello"
    thread.join()


def test_signals_are_events_inside_the_block_only(events: EventQueue) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with events.signals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert events.get(timeout=30) == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_another_thread_gets_wakes_the_reader_at_once(events: EventQueue) -> None:
    """The kernel may hand a signal to any thread; here the main thread doesn't want it."""
    ready = threading.Event()

    def receive() -> None:
        ready.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=receive)
    with events.signals():
        thread.start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            begin = time.monotonic()
            ready.set()
            assert events.get(timeout=30) == signal.SIGTERM
            assert time.monotonic() - begin < 10
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            thread.join()


def test_a_pause_ends_early_for_what_ends_a_run(events: EventQueue) -> None:
    for event in (
        signal.SIGINT,
        FailureReport(text="machine 1 …", status=1),
    ):
        events.put(event)
        with pytest.raises(Interrupted) as caught:
            events.pause(30)
        assert caught.value.event == event
    events.put("the rendezvous is lost")
    events.pause(30)
