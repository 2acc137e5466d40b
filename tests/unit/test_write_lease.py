"""The lease by which a member knows that the others can't have expelled it for its silence."""

from __future__ import annotations

import threading

import pytest

from paceline.cluster.membership.leases.write_lease import WriteLease

DURATION = 10.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> WriteLease:
    made = WriteLease("a", DURATION, clock)
    made.enter(["a", "b", "c"])
    return made


def test_it_lasts_for_the_peer_timeout_from_the_generations_begin(
    lease: WriteLease, clock: Clock
) -> None:
    clock.now += DURATION - 0.1
    assert lease.lasts
    clock.now += 0.1
    assert not lease.lasts
    assert not lease.wait(0)


def test_reports_that_all_others_received_renew_it_from_when_they_were_sent(
    lease: WriteLease, clock: Clock
) -> None:
    clock.now += 4
    number = lease.send()
    clock.now += 5
    lease.confirm("b", number)
    clock.now += 2
    assert not lease.lasts  # c has confirmed none
    lease.confirm("c", number)
    assert lease.lasts
    clock.now += 3
    assert not lease.lasts


def test_a_report_from_before_a_stop_does_not_renew_it(lease: WriteLease, clock: Clock) -> None:
    number = lease.send()
    clock.now += 1000  # stopped; the confirmations were waiting
    for member in ("b", "c"):
        lease.confirm(member, number)
    assert not lease.lasts
    number = lease.send()
    for member in ("b", "c"):
        lease.confirm(member, number)
    assert lease.lasts


def test_a_member_that_ends_well_is_not_waited_for(lease: WriteLease, clock: Clock) -> None:
    number = lease.send()
    clock.now += DURATION - 1
    lease.release("c")
    lease.confirm("b", number)
    lease.release("b")
    clock.now += DURATION
    assert lease.lasts


def test_a_member_that_is_outside_the_world_has_none_any_more(lease: WriteLease) -> None:
    lease.end()
    lease.enter(["a"])
    assert not lease.wait(60)


def test_a_wait_ends_with_the_renewal(lease: WriteLease, clock: Clock) -> None:
    clock.now += DURATION
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(lease.wait(60)))
    waiting.start()
    number = lease.send()
    lease.confirm("b", number)
    lease.confirm("c", number)
    waiting.join(60)
    assert found == [True]


def test_a_generation_that_a_stopped_member_learns_of_late_does_not_renew_it(
    lease: WriteLease, clock: Clock
) -> None:
    clock.now += DURATION + 5
    lease.enter(["a", "b"], renew=False)
    assert not lease.lasts
    lease.confirm("b", lease.send())
    assert lease.lasts


def test_a_wait_ends_with_the_lease(lease: WriteLease, clock: Clock) -> None:
    clock.now += DURATION
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(lease.wait(600)))
    waiting.start()
    lease.end()
    waiting.join(60)
    assert found == [False]
