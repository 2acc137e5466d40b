"""What a member knows of the others, and which of them it suspects."""

from __future__ import annotations

import time

import pytest

from paceline.cluster.membership.evidence import EvidenceOptions
from paceline.cluster.membership.member_watch import MemberWatch
from tests.harness.processes.worlds import world_of

GENERATION = world_of((1, 1, 1), 0).generation
A, B, C = (member.id for member in GENERATION.members)


def watch_of(member: str) -> MemberWatch:
    watch = MemberWatch(member, EvidenceOptions(peer_timeout=10.0, timeout=60.0))
    watch.begin(GENERATION, {A, B, C})
    for other in (A, B, C):
        watch.progressed(other, 1, 7, {A: 1, B: 2, C: 3})
    return watch


def test_of_two_members_that_lose_each_other_the_others_suspect_that_of_the_higher_rank() -> None:
    for reporter, apart in ((B, C), (C, B)):
        watch = watch_of(A)
        watch.reported(reporter, [apart], {})
        assert watch.judge({B: 0.1, C: 0.1})
        assert watch.suspicions.keys() == {C}
        names = [GENERATION.describe(rank) for rank in (2, 1)]
        assert watch.cause_of(C) == (
            f"the link between {names[0]} and {names[1]} is cut, and the others continue without "
            "the first"
        )


def test_a_member_that_is_reported_itself_suspects_no_member_for_that() -> None:
    watch = watch_of(B)
    watch.reported(C, [B], {})
    assert not watch.judge({A: 0.1, C: 0.1})


def test_a_member_reports_whose_heartbeats_come_with_their_last_reports() -> None:
    watch = watch_of(A)
    assert watch.received() == {A: 7, B: 7, C: 7}
    watch.progressed(B, 1, 8, {})
    assert watch.received() == {A: 7, B: 8, C: 7}


def test_a_member_without_evidence_names_the_cause_that_another_one_reports() -> None:
    watch = watch_of(A)
    watch.reported(B, [], {C: "C was killed by SIGKILL"})
    assert not watch.judge({B: 0.1, C: 0.1})
    assert watch.cause_of(C) == "C was killed by SIGKILL"
    watch.exited(C, "ended")
    assert watch.judge({B: 0.1, C: 0.1})
    assert watch.cause_of(C) == watch.suspicions[C].reason != "C was killed by SIGKILL"
    watch.enter(GENERATION, {A, B})
    assert watch.reasons() == {C: watch.cause_of(C)}


def test_after_a_step_that_was_long_on_all_members_none_is_slow_whose_report_comes_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a model is compiled anew, or each step takes longer than the timeout."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = watch_of(A)
    for _ in range(99):  # of a step: longer than the timeout
        now += 0.9
        assert not watch.judge({B: 0.1, C: 0.1})
    watch.progressed(A, 7, 8, {A: 1, B: 2, C: 3})
    watch.progressed(B, 7, 8, {A: 1, B: 2, C: 3})
    for _ in range(65):
        now += 0.9
        assert not watch.judge({B: 0.1, C: 0.1})
    for _ in range(3):
        now += 0.9
        watch.judge({B: 0.1, C: 0.1})
    assert watch.suspicions.keys() == {C}  # behind the others for longer than the timeout
