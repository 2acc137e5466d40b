"""What members know of what the others do, over real control lines."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from paceline.cluster.membership.control_line import activities as module
from paceline.cluster.membership.control_line.activities import (
    STEP,
    WAITING,
    WORKING,
    Activities,
    Activity,
)
from paceline.cluster.membership.control_line.line import ControlLine
from paceline.cluster.membership.evidence import EvidenceOptions
from paceline.cluster.membership.generation import Generation
from paceline.comm.peer_activities import LOOK_S, NO_PEERS, PeerActivities, WaitLimit
from paceline.errors import ConfigError, IdleTimeout, Message
from tests.harness.equivalence.steps_by_hand import active_step
from tests.harness.processes.run_folders import wait_until
from tests.harness.processes.worlds import world_of

IDLE = 30.0


class Rank:
    """A rank with a control line, on which it knows what the others do."""

    def __init__(self, generation: Generation, rank: int) -> None:
        member = generation.members[rank]
        self.id = member.id
        self.lines: list[str] = []
        self.line = ControlLine(
            name=member.id,
            secret=b"secret",
            address="127.0.0.1",
            handler=self,
            beat_seconds=0.02,
        )
        self.activities = Activities(
            self.line,
            generation,
            member.id,
            EvidenceOptions(peer_timeout=10.0, timeout=60.0, idle_timeout=IDLE),
            self.print,
        )

    def print(self, message: Message) -> None:
        self.lines.append(str(message))

    def received(self, peer: str, kind: str, body: dict[str, Any], bulk: bytes | bytearray) -> None:
        assert kind == module.ACTIVITY
        self.activities.received(peer, body)

    def opened(self, peer: str) -> None:
        pass

    def closed(self, peer: str, reason: str) -> None:
        pass

    def sees(self, other: Rank, state: int) -> bool:
        return self.line.carried(other.id) == state

    def knows(self, other: Rank) -> bool:
        """Whether it has the present activity of another rank, wherever that stands."""
        known = self.activities._others.get(other.id, Activity(steps=-1))
        return replace(known, script_line="") == replace(other.activities.own(), script_line="")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    monkeypatch.setattr(module, "_TICK_S", 0.02)
    generation = world_of((3,)).generation
    made = [Rank(generation, rank) for rank in range(3)]
    for one in made:
        for other in made:
            one.line.expect(other.id, "127.0.0.1", other.line.port)
    for one in made:
        assert not one.line.wait_connected([other.id for other in made], 20.0)
    yield made
    for one in made:
        one.line.close()


def test_beats_say_what_a_rank_does(ranks: list[Rank]) -> None:
    first, second, _ = ranks
    assert set(second.activities.busy()) == {first.id, ranks[2].id}
    with active_step(first.activities, 3):
        wait_until(lambda: second.sees(first, STEP))
        assert set(second.activities.busy()) == {ranks[2].id}
    wait_until(lambda: second.sees(first, WORKING))
    assert first.activities.begin_waiting()
    wait_until(lambda: second.sees(first, WAITING))
    first.activities.end_waiting()
    wait_until(lambda: second.sees(first, WORKING))


def test_only_the_training_thread_waits_for_its_rank(ranks: list[Rank]) -> None:
    first = ranks[0]
    found: list[int] = []

    def begin() -> None:
        assert not first.activities.begin_waiting()
        found.append(first.activities.own().state)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert found == [WORKING]


def test_the_first_rank_that_waits_names_a_busy_one_once(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUIET_S", 0.5)
    busy, *waiting = ranks
    with active_step(busy.activities, 6), busy.activities.call("world.total()"):
        pass
    with ExitStack() as stack:
        for one in waiting:
            stack.enter_context(active_step(one.activities, 7))
        for one in waiting:
            wait_until(lambda one=one: one.knows(busy))  # type: ignore[misc]
            wait_until(lambda: waiting[0].sees(waiting[1], STEP))
            wait_until(lambda: waiting[1].sees(waiting[0], STEP))
        for one in waiting:
            busy = {}
            for _ in range(2):
                assert one.activities.look("bucket 0 in step 7", busy, 1.0) > 0
            assert busy == {ranks[0].id: 2.0}
    assert not waiting[1].lines
    (line,) = waiting[0].lines
    assert re.fullmatch(
        r"rank 1 on machine 0 \(a\) waits in bucket 0 in step 7 for rank 0 on machine 0 \(a\), "
        r"which has worked outside a step for \d s: its last step was step 6; it is at \S+ in "
        r"\w+\(\)\. All wait for it, up to 30 s \(--idle_timeout\)\.",
        line,
    ), line


def test_a_rank_that_is_busy_for_too_long_ends_the_wait(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, second, third = ranks
    with active_step(second.activities, 1), active_step(third.activities, 1):
        wait_until(lambda: second.sees(third, STEP))
        seconds: dict[str, float] = {}
        assert second.activities.look("bucket 0 in step 1", seconds, 1.0) > 0
        second.activities.longest = 0.5
        with pytest.raises(IdleTimeout, match=r"rank 0 .* has worked outside a step for \d+ s"):
            second.activities.look("bucket 0 in step 1", seconds, 1.0)
    assert list(seconds) == [busy.id]


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ("step", "is in step 4"),
        ("call", r"is in world\.merge\(\)"),
        ("end", "has closed its world"),
    ],
)
def test_a_peer_that_does_something_else_is_named(
    ranks: list[Rank], instead: str, said: str
) -> None:
    first, second, third = ranks
    for one in ranks:
        with active_step(one.activities, 3), one.activities.call("world.total()"):
            pass
    with ExitStack() as stack:
        if instead == "step":
            stack.enter_context(active_step(second.activities, 4))
        elif instead == "call":
            stack.enter_context(second.activities.call("world.merge()"))
        else:
            with second.activities.call("world.close()"):
                second.activities.close()
        wait_until(lambda: first.knows(second))
        wait_until(lambda: first.knows(third))
        with first.activities.call("world.total()"):
            text = rf"^rank 0 waits in world\.total\(\), but rank 1 {said}: all ranks"
            with pytest.raises(ConfigError, match=text):
                first.activities.look("world.total()", {}, 1.0)


def test_a_peer_that_has_made_the_call_or_may_still_make_it_is_waited_for(
    ranks: list[Rank],
) -> None:
    first, second, third = ranks
    with second.activities.call("world.total()"):
        pass
    with (
        active_step(second.activities, 0),
        first.activities.call("world.total()"),
    ):  # it has made it
        wait_until(lambda: first.knows(second))
        wait_until(lambda: first.knows(third))
        first.activities.look("world.total()", {}, 1.0)


class BusyPeers(PeerActivities):
    """Peers of which one works outside a step for 100 s of each wait, by its own clock."""

    def look(self, operation: str, busy: dict[str, float], passed: float) -> float:
        before = busy.get("a", 0.0)
        busy["a"] = 100.0
        return 100.0 - before


def test_a_limit_counts_no_time_in_which_a_peer_works_outside_a_step() -> None:
    assert WaitLimit(0.0, NO_PEERS, "a sum").look()
    limit = WaitLimit(0.0, BusyPeers(), "a sum")
    assert not limit.look()
    assert limit.slice() == LOOK_S
    assert 99 < limit.slice(200.0) < 100
    assert WaitLimit(0.0, BusyPeers(), "a sum", extends=False).look()
