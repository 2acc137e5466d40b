"""What a change of the generation took, by an injected clock."""

from __future__ import annotations

import pytest

from paceline.observe.change_account import ChangeAccount, ReplayTimes
from paceline.timeline.timeline import Timeline


def account(*moments: float) -> ChangeAccount:
    """Return an account whose clock shows one moment after another."""
    clock = iter(moments)
    return ChangeAccount(Timeline(lambda: round(next(clock) * 1e9)))


def test_a_change_is_divided_among_its_parts() -> None:
    changes = account(10.0, 12.0, 15.0, 15.5, 17.0)
    changes.lose(8)
    changes.leave()
    changes.decide(9.0)
    changes.restore(6, 4)
    times = changes.enter()
    assert times.detected_at == 9
    parts = times.interrupt, times.decide, times.restore, times.form
    assert parts == (3, 3, 0.5, 1.5)
    assert (times.steps, times.interval) == (2, 4)


@pytest.mark.parametrize("detected_at", [None, 11.0])
def test_the_training_thread_may_detect_a_loss_first(detected_at: float | None) -> None:
    changes = account(10.0, 12.0, 12.0, 12.0, 12.0)
    changes.lose(0)
    changes.leave()
    changes.decide(detected_at)
    changes.restore(0, 1)
    assert changes.enter().detected_at == 10


def enter(changes: ChangeAccount, lost: int, start: int) -> None:
    changes.lose(lost)
    changes.leave()
    changes.decide(None)
    changes.restore(start, 1)
    changes.enter()


def test_the_replay_ends_where_the_lost_step_begins() -> None:
    changes = account(0, 0, 0, 0, 1.0, 3.0, 4.0, 8.0)
    assert changes.begin_step(5) is None
    enter(changes, 7, 5)
    assert changes.begin_step(5) is None
    assert changes.begin_step(6) is None
    assert changes.begin_step(7) == ReplayTimes(steps=2, resume=2, replay=5)
    assert changes.begin_step(8) is None


def test_a_loss_in_a_replay_leads_to_a_replay_up_to_the_first_one() -> None:
    changes = account(*[0.0] * 6, *[1.0] * 5, 2.0, 2.0, 5.0)
    enter(changes, 9, 5)
    assert changes.begin_step(5) is None
    enter(changes, 6, 5)
    assert changes.begin_step(5) is None
    assert changes.begin_step(6) is None
    assert changes.begin_step(9) == ReplayTimes(steps=4, resume=1, replay=3)
