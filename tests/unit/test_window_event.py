"""What a thread of a window sleeps on."""

from __future__ import annotations

import os

from paceline.comm.transport.transport import WakeEvent


def test_who_was_woken_sleeps_again() -> None:
    event = WakeEvent()
    assert not event.sleep(0.0)
    for _ in range(2):
        os.eventfd_write(event.number, 1)
        assert event.sleep(60.0)
        assert not event.sleep(0.01)


def test_what_was_forgotten_wakes_nobody() -> None:
    event = WakeEvent()
    event.clear()
    os.eventfd_write(event.number, 1)
    event.clear()
    assert not event.sleep(0.01)
