"""Which members are suspected, and in which words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.membership.evidence import (
    EvidenceOptions,
    MemberEvidence,
    Observer,
    Suspicion,
    judge,
)

OPTIONS = EvidenceOptions(peer_timeout=10, timeout=60)
NOW = 1000.0
OBSERVER = Observer(id="a", judged_at=NOW, resumed_at=0)
IDS = ("a", "b", "c", "d")
NAMES = {member: f"rank {rank} on machine {rank} (host{rank})" for rank, member in enumerate(IDS)}


def healthy(member: str, **changes: object) -> MemberEvidence:
    usual = MemberEvidence(name=NAMES[member], last_beat=NOW - 0.1, step=9, progress_at=NOW - 0.1)
    return replace(usual, **changes)  # type: ignore[arg-type]


def judged(observer: Observer = OBSERVER, **members: MemberEvidence) -> dict[str, Suspicion]:
    return judge(NOW, {"a": healthy("a"), "c": healthy("c")} | members, OPTIONS, observer)


EXIT = "exited with signal 9 (SIGKILL)"
SILENT = NOW - 10.2
LATE = NOW - 61.3


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"exited": EXIT}, "exited", f"rank 1 on machine 1 (host1) {EXIT}"),
        ({"exited": EXIT, "closed_at": NOW}, "exited", f"rank 1 on machine 1 (host1) {EXIT}"),
        ({"closed_at": NOW - 0.1}, None, ""),
        (
            {"closed_at": NOW - 0.3},
            "closed",
            "the connections of rank 1 on machine 1 (host1) ended 0.3 s ago",
        ),
        ({"last_beat": NOW - 9.9}, None, ""),
        (
            {"last_beat": SILENT},
            "frozen",
            "rank 1 on machine 1 (host1) has sent no heartbeat for 10.2 s (--peer_timeout 10)",
        ),
        (
            {"last_beat": SILENT, "received_by": ("c",)},
            "cut off",
            "rank 1 on machine 1 (host1) has sent no heartbeat for 10.2 s (--peer_timeout 10); "
            "only the link is cut: rank 2 on machine 2 (host2) received heartbeats",
        ),
        ({"progress_at": LATE}, None, ""),  # all are in the same step, and none waits for it
        ({"progress_at": NOW - 59, "step": 8}, None, ""),
        (
            {"progress_at": LATE, "step": 8},
            "slow",
            "rank 1 on machine 1 (host1) has made no progress for 61.3 s (--timeout 60): it is in "
            "step 8, and rank 0 on machine 0 (host0) is in step 9",
        ),
        (
            {"progress_at": LATE, "timed_out": ("a", "c")},
            "slow",
            "rank 1 on machine 1 (host1) has made no progress for 61.3 s (--timeout 60): it is in "
            "step 9, and rank 0 on machine 0 (host0), rank 2 on machine 2 (host2) timed out "
            "waiting in it",
        ),
        # Outside a step, or in one since less than the timeout.
        ({"progress_at": LATE, "outside_at": NOW - 0.5, "step": 8}, None, ""),
        ({"progress_at": LATE, "outside_at": NOW - 59, "timed_out": ("a", "c")}, None, ""),
        (
            {"progress_at": NOW - 400, "outside_at": LATE, "step": 8},
            "slow",
            "rank 1 on machine 1 (host1) has made no progress for 61.3 s (--timeout 60): it is in "
            "step 8, and rank 0 on machine 0 (host0) is in step 9",
        ),
        (  # gone, or frozen, wherever it stood
            {"exited": EXIT, "outside_at": NOW},
            "exited",
            f"rank 1 on machine 1 (host1) {EXIT}",
        ),
        (
            {"last_beat": SILENT, "outside_at": SILENT},
            "frozen",
            "rank 1 on machine 1 (host1) has sent no heartbeat for 10.2 s (--peer_timeout 10)",
        ),
    ],
)
def test_the_reason_says_what_was_seen(
    changes: dict[str, object], kind: str | None, reason: str
) -> None:
    found = judged(b=healthy("b", **changes))
    assert found == ({} if kind is None else {"b": Suspicion(kind=kind, reason=reason)})  # type: ignore[arg-type]


def test_a_member_that_is_itself_silent_doesnt_vouch_for_another() -> None:
    silent = healthy("b", last_beat=SILENT, received_by=("c",))
    found = judged(b=silent, c=healthy("c", last_beat=SILENT))
    assert {member: each.kind for member, each in found.items()} == {"b": "frozen", "c": "frozen"}


def test_of_those_in_the_earliest_step_the_one_that_waits_for_another_is_not_behind() -> None:
    waits = healthy("b", step=8, progress_at=LATE, timed_out=("a",))
    hangs = healthy("c", step=8, progress_at=LATE, timed_out=("a", "b"))
    assert set(judged(b=waits, c=hangs)) == {"c"}


def test_only_those_in_the_earliest_step_are_behind() -> None:
    later = healthy("b", step=8, progress_at=LATE)
    earliest = healthy("c", step=7, progress_at=LATE)
    assert set(judged(b=later, c=earliest)) == {"c"}


def test_a_member_in_its_first_step_is_not_behind() -> None:
    first = healthy("b", step=0, progress_at=LATE)
    assert not judged(b=first)
    assert judged(b=replace(first, timed_out=("a",))).keys() == {"b"}


def test_no_member_is_slow_where_all_wait_for_each_other() -> None:
    late = {"progress_at": LATE}
    everyone = {
        member: healthy(member, timed_out=tuple(set("abc") - {member}), **late) for member in "abc"
    }
    assert judged(**everyone) == {}


def test_the_step_of_a_lost_member_says_nothing_of_the_others() -> None:
    ahead = healthy("b", step=10, exited=EXIT)
    assert set(judged(b=ahead, c=healthy("c", progress_at=LATE))) == {"b"}


def test_silences_are_counted_from_the_end_of_an_own_pause() -> None:
    observer = Observer.starting("a", NOW - 100).at(NOW - 99.5)
    assert observer.resumed_at == NOW - 100
    silent = {
        "b": healthy("b", last_beat=NOW - 99),
        "c": healthy("c", step=8, progress_at=NOW - 99),
    }
    assert set(judged(observer, **silent)) == {"b", "c"}
    resumed = observer.at(NOW)
    assert resumed.resumed_at == NOW
    assert judged(resumed, **silent) == {}
    closed = healthy("b", closed_at=NOW - 50)  # which needs no silence
    assert judged(resumed, b=closed)["b"].kind == "closed"


def test_judgments_in_time_are_no_pause() -> None:
    observer = Observer.starting("a", 0)
    for tick in range(1, 50):
        observer = observer.at(tick * 0.9)
    assert observer == Observer(id="a", judged_at=49 * 0.9, resumed_at=0)


ages = st.floats(0, 200)
some_ids = st.lists(st.sampled_from(IDS), unique=True).map(tuple)


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, MemberEvidence]:
    return {
        member: MemberEvidence(
            name=NAMES[member],
            last_beat=NOW - draw(st.floats(0, 9) | ages),
            step=draw(st.integers(7, 9)),
            progress_at=NOW - draw(ages),
            outside_at=NOW - draw(st.just(1e9) | ages),
            exited=draw(st.sampled_from([None, None, None, EXIT])),
            closed_at=draw(st.none() | st.none() | ages.map(lambda age: NOW - age)),
            received_by=draw(some_ids),
            timed_out=draw(st.just(()) | some_ids),
        )
        for member in draw(st.lists(st.sampled_from(IDS), unique=True))
    }


@given(worlds())
def test_only_others_are_suspected_and_by_name(world: dict[str, MemberEvidence]) -> None:
    for member, suspicion in judge(NOW, world, OPTIONS, OBSERVER).items():
        assert member in world
        assert member != OBSERVER.id
        assert NAMES[member] in suspicion.reason


@given(worlds())
def test_an_exit_and_a_silence_are_always_suspected(world: dict[str, MemberEvidence]) -> None:
    found = judge(NOW, world, OPTIONS, OBSERVER)
    for member, each in world.items():
        silent = NOW - each.last_beat > OPTIONS.peer_timeout
        if member != OBSERVER.id and (each.exited or silent):
            kinds = {"exited"} if each.exited else {"closed", "frozen", "cut off"}
            assert found[member].kind in kinds


@given(worlds())
def test_silence_below_the_peer_timeout_changes_nothing(world: dict[str, MemberEvidence]) -> None:
    kinds = {
        member: suspicion.kind
        for member, suspicion in judge(NOW, world, OPTIONS, OBSERVER).items()
        if NOW - world[member].last_beat <= OPTIONS.peer_timeout
    }
    assert not set(kinds.values()) & {"frozen", "cut off"}


@given(worlds())
def test_slow_is_only_one_that_is_behind_without_progress_and_waits_for_no_other(
    world: dict[str, MemberEvidence],
) -> None:
    found = judge(NOW, world, OPTIONS, OBSERVER)
    slow = {member for member, suspicion in found.items() if suspicion.kind == "slow"}
    remaining = {member: each for member, each in world.items() if member not in set(found) - slow}
    for member in slow:
        latest = max(world[member].progress_at, world[member].outside_at)
        assert NOW - latest > OPTIONS.timeout
        assert world[member].step == min(each.step for each in remaining.values())
        assert not any(member in each.timed_out for each in remaining.values())
    assert set(remaining) - slow or not slow  # at least one member is waited for by another


@given(worlds())
def test_after_a_pause_no_silence_counts(world: dict[str, MemberEvidence]) -> None:
    resumed = replace(OBSERVER, judged_at=NOW - 30).at(NOW)
    kinds = {each.kind for each in judge(NOW, world, OPTIONS, resumed).values()}
    assert kinds <= {"exited", "closed"}


@given(worlds(), st.integers(-1000, 1_000_000))
def test_only_differences_of_the_clock_matter(
    world: dict[str, MemberEvidence], offset: int
) -> None:
    whole = {  # whole numbers: their sums are exact
        member: replace(
            each,
            last_beat=float(int(each.last_beat)),
            progress_at=float(int(each.progress_at)),
            outside_at=float(int(each.outside_at)),
            closed_at=None if each.closed_at is None else float(int(each.closed_at)),
        )
        for member, each in world.items()
    }
    moved = {
        member: replace(
            each,
            last_beat=each.last_beat + offset,
            progress_at=each.progress_at + offset,
            outside_at=each.outside_at + offset,
            closed_at=None if each.closed_at is None else each.closed_at + offset,
        )
        for member, each in whole.items()
    }
    later = replace(OBSERVER, judged_at=NOW + offset, resumed_at=offset)
    assert judge(NOW + offset, moved, OPTIONS, later) == judge(NOW, whole, OPTIONS, OBSERVER)
