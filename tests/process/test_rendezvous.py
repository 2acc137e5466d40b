"""How machines form a run, and what refuses to: supervisors are processes of this machine."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from paceline.cluster.membership.leases.lease import BEAT_S, LIMIT_S
from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.rendezvous.registration import Registration, RunRecord
from paceline.cluster.stores.store_spec import StoreSpec, open_store
from paceline.cluster.supervision.worker import read_world
from tests.harness.network.redis_server import redis_server
from tests.harness.network.rendezvous import KINDS, SPACE, left_behind, plan, rendezvous_of
from tests.harness.processes.supervisor_stage import Actor, Stage, Supervisor, at_most


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StoreSpec]:
    with rendezvous_of("folder", tmp_path) as made:
        yield made


@pytest.fixture(params=KINDS)
def rendezvous(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreSpec]:
    with rendezvous_of(request.param, tmp_path) as made:
        yield made


@pytest.fixture(params=["redis", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreSpec]:
    """A store that outlives all machines, and one that machine 0 serves; others differ in less."""
    with rendezvous_of(request.param, tmp_path) as made:
        yield made


def end(actors: list[Actor], supervisors: list[Supervisor]) -> None:
    for actor in actors:
        actor.send_order("exit 0")
    assert [supervisor.status() for supervisor in supervisors] == [0] * len(supervisors)


def said(supervisor: Supervisor, text: str) -> bool:
    """Wait until a supervisor has said something; False if it ends without."""
    while text not in supervisor.text:
        if supervisor.status(within=0.05) is not None:
            return text in supervisor.text
    return True


def test_machines_with_different_numbers_of_workers_form_one_world(
    stage: Stage, rendezvous: StoreSpec
) -> None:
    counts = (2, 1, 3)
    supervisors = [
        stage.start(plan(rendezvous, machine, 3, workers=counts[machine])) for machine in (2, 0, 1)
    ]
    actors = stage.actors(6)
    worlds = [read_world(actor.environment) for actor in actors]
    groups = [group for group, _ in worlds]
    assert [group.rank for group in groups] == [0, 1, 2, 3, 4, 5]
    assert [(group.machine, group.local_rank) for group in groups] == [
        *((0, 0), (0, 1)),
        (1, 0),
        *((2, 0), (2, 1), (2, 2)),
    ]
    assert {(group.size, group.address) for group in groups} == {(6, "127.0.0.1")}
    (generation,) = {group.generation for group in groups}
    assert generation.workers_per_machine == counts
    again, _ = read_world(actors[3].environment)  # what it joins next has keys of its own
    assert (again.rank, again.generation.members) == (3, generation.members)
    assert again.generation.token != generation.token
    others, _ = read_world(actors[0].environment)
    assert others.generation == again.generation
    worlds[0][1].set("from rank 0", "hello")
    assert worlds[5][1].get("from rank 0") == b"hello"
    del worlds
    end(actors, supervisors)
    assert left_behind(rendezvous) == []


def test_a_machine_alone_uses_the_rendezvous_too(stage: Stage, folder: StoreSpec) -> None:
    supervisor = stage.start(plan(folder, 0, 1))
    end(stage.actors(1), [supervisor])
    assert left_behind(folder) == []


def test_who_waits_says_for_whom(stage: Stage, store: StoreSpec) -> None:
    last = stage.start(plan(store, 2, 3))
    assert said(last, "paceline: waiting for machine 0 of 3")
    first = stage.start(plan(store, 0, 3))
    assert said(first, "waiting for machine 1 of 3\n")
    assert said(last, "waiting for machine 1 of 3\n")
    second = stage.start(plan(store, 1, 3))
    for supervisor in (first, second, last):
        assert said(supervisor, "all 3 machines have joined; rank 0 is on ")
    end(stage.actors(3), [first, second, last])


def test_a_machine_that_never_comes_is_named_at_the_limit(stage: Stage, store: StoreSpec) -> None:
    last = stage.start(plan(store, 2, 4, first_iter_timeout=8.0))
    assert said(last, "waiting for machine 0 of 4")
    first = stage.start(plan(store, 0, 4, first_iter_timeout=3.0))
    with at_most(20):
        assert first.status() == 1
        assert last.status() == 1
    assert "machines 1, 3 of 4 didn't come within 3 s: start them with --run_id r" in first.text
    assert left_behind(store) == []


def test_a_live_run_is_not_disturbed_by_another_of_its_name(
    stage: Stage, rendezvous: StoreSpec
) -> None:
    if rendezvous.kind == "tcp":
        pytest.skip("there the port itself is taken: tests/contract/test_store_errors.py")
    live = stage.start(plan(rendezvous, 0, 1))
    actors = stage.actors(1)
    another = stage.start(plan(rendezvous, 0, 1))
    with at_most(20):
        assert another.status() == 2
    host = os.uname().nodename
    assert f"--run_id r is in use by a live run on host {host}" in another.text
    assert "choose another, or stop that run" in another.text
    end(actors, [live])


def test_a_taken_tcp_port_is_a_sentence(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        supervisor = stage.start(plan(StoreSpec(kind="tcp", address=address, space=SPACE), 0, 2))
        assert supervisor.status() == 2
    assert "another run may be using it; choose another port" in supervisor.text


def test_of_two_that_open_a_run_at_once_one_wins(stage: Stage, folder: StoreSpec) -> None:
    both = [stage.start(plan(folder, 0, 1)) for _ in range(2)]
    wait([supervisor.process.sentinel for supervisor in both], timeout=20)
    loser, winner = sorted(both, key=lambda supervisor: supervisor.process.exitcode is None)
    assert loser.status() == 2
    assert "is in use by a live run" in loser.text
    actors = stage.actors(1)
    end(actors, [winner])
    assert left_behind(folder) == []


def test_a_machines_number_that_a_live_one_has_is_refused(stage: Stage, store: StoreSpec) -> None:
    supervisors = [stage.start(plan(store, machine)) for machine in (0, 1)]
    actors = stage.actors(2)
    another = stage.start(plan(store, 1))
    with at_most(20):
        assert another.status() == 2
    assert "--shard_id 1 of run 'r' is taken by a live machine" in another.text
    end(actors, supervisors)


def test_machines_that_disagree_on_their_number_all_say_so(stage: Stage, store: StoreSpec) -> None:
    first = stage.start(plan(store, 0, 2))
    other = stage.start(plan(store, 1, 3))
    assert [first.status(), other.status()] == [2, 2]
    for supervisor in (first, other):
        assert "--num_shards 3 on machine 1, but 2 on machine 0" in supervisor.text
        assert "give the same number on all machines" in supervisor.text


def test_a_killed_run_starts_again_at_once(stage: Stage, rendezvous: StoreSpec) -> None:
    killed = [stage.start(plan(rendezvous, machine)) for machine in (0, 1)]
    old = stage.actors(2)
    for supervisor in killed:
        supervisor.send(signal.SIGKILL)
        assert supervisor.status() == -signal.SIGKILL
    assert all(actor.ended() for actor in old)
    follower = stage.start(plan(rendezvous, 1))  # finds the dead run first
    assert said(follower, "waiting for machine 0 of 2")
    with at_most(LIMIT_S + 15):
        leader = stage.start(plan(rendezvous, 0))
        new = stage.actors(2)
    assert {actor.environment.start_id for actor in new}.isdisjoint(
        {actor.environment.start_id for actor in old}
    )
    end(new, [leader, follower])
    assert left_behind(rendezvous) == []


def test_a_machine_killed_before_all_had_come_can_come_again(
    stage: Stage, store: StoreSpec
) -> None:
    leader = stage.start(plan(store, 0, 3))
    killed = stage.start(plan(store, 1, 3))
    assert said(killed, "waiting for machine 2 of 3")
    killed.send(signal.SIGKILL)
    assert killed.status() is not None
    assert said(leader, "waiting for machines 1, 2 of 3")
    again = stage.start(plan(store, 1, 3))
    last = stage.start(plan(store, 2, 3))
    end(stage.actors(3), [leader, again, last])


def test_machines_that_wait_find_machine_0_after_it_was_killed_and_came_again(
    stage: Stage, store: StoreSpec
) -> None:
    killed = stage.start(plan(store, 0, 3))
    follower = stage.start(plan(store, 1, 3))
    assert said(follower, "waiting for machine 2 of 3")
    killed.send(signal.SIGKILL)
    assert killed.status() is not None
    leader = stage.start(plan(store, 0, 3))
    last = stage.start(plan(store, 2, 3))
    end(stage.actors(3), [leader, follower, last])
    assert left_behind(store) == []


def test_a_machine_that_comes_back_to_a_run_in_its_course_waits_for_the_next_start(
    stage: Stage, store: StoreSpec
) -> None:
    first, killed = (stage.start(plan(store, machine, timeout=1.0)) for machine in (0, 1))
    old = stage.actors(2)
    killed.send(signal.SIGKILL)
    assert killed.status() is not None
    back = stage.start(plan(store, 1))
    assert said(back, "waiting for machine 0 of 2")
    end(old[:1], [first])
    leader = stage.start(plan(store, 0))
    new = stage.actors(2)
    assert {actor.environment.start_id for actor in new}.isdisjoint(
        {actor.environment.start_id for actor in old}
    )
    end(new, [leader, back])


def test_a_wrong_number_of_machines_doesnt_end_a_run_in_its_course(
    stage: Stage, store: StoreSpec
) -> None:
    running = [stage.start(plan(store, machine)) for machine in (0, 1)]
    actors = stage.actors(2)
    other = stage.start(plan(store, 2, 3))
    assert other.status() == 2
    assert "--num_shards 3 on machine 2, but 2 on machine 0" in other.text
    assert not read_world(actors[0].environment)[1].check(["failure"])
    end(actors, running)


@pytest.mark.parametrize("machine", [0, 1])
def test_a_signal_ends_the_wait_and_leaves_nothing(
    stage: Stage, store: StoreSpec, machine: int
) -> None:
    supervisor = stage.start(plan(store, machine))
    assert said(supervisor, "waiting for")
    with at_most(20):
        supervisor.send(signal.SIGINT)
        assert supervisor.status() == 130
    assert left_behind(store) == []


def elsewhere(machines: int) -> RunRecord:
    """The record of a run whose machine 0 is another machine: its kernel can't be asked."""
    who = replace(ProcessIdentity.of_this_process(), kernel="another boot", host="farnode")
    registration = Registration(id="far", process=who, workers=1, addresses=("127.0.0.1",), port=1)
    return RunRecord(generation="old", machines=machines, leader=registration)


def test_another_machines_dead_run_is_known_by_its_lease(stage: Stage, folder: StoreSpec) -> None:
    store = open_store(folder, timedelta(seconds=5), make=True)
    inside = open_store(folder.subspace("old"), timedelta(seconds=5), make=True)
    store.set("run", elsewhere(1).to_text())
    inside.set("lease/far", "1234")
    (Path(folder.address) / SPACE / "tmp=half").mkdir()
    (Path(folder.address) / SPACE / "older incarnation").mkdir()
    with at_most(LIMIT_S + 15):
        supervisor = stage.start(plan(folder, 0, 1))
        actors = stage.actors(1)
    end(actors, [supervisor])
    assert os.listdir(Path(folder.address) / SPACE) == ["older incarnation"]


def test_a_machine_that_finds_a_dead_run_leaves_it_alone(stage: Stage, folder: StoreSpec) -> None:
    store = open_store(folder, timedelta(seconds=5), make=True)
    inside = open_store(folder.subspace("old"), timedelta(seconds=5), make=True)
    store.set("run", elsewhere(2).to_text())
    inside.set("lease/far", "1234")
    supervisor = stage.start(plan(folder, 1, first_iter_timeout=1.0))
    assert supervisor.status() == 1
    assert "machine 0 of 2 didn't come within 1 s" in supervisor.text
    space = Path(folder.address) / SPACE
    assert sorted(os.listdir(space)) == ["key=run", "old"]
    assert os.listdir(space / "old") == ["key=lease%2Ffar"]


def test_another_machines_live_run_is_known_by_its_lease(stage: Stage, folder: StoreSpec) -> None:
    store = open_store(folder, timedelta(seconds=5), make=True)
    store.set("run", elsewhere(1).to_text())
    done = threading.Event()

    def beat() -> None:
        lease = open_store(folder.subspace("old"), timedelta(seconds=5), make=True)
        while not done.wait(BEAT_S):
            lease.add("lease/far", 1)

    thread = threading.Thread(target=beat)
    thread.start()
    supervisor = stage.start(plan(folder, 0, 1))
    try:
        assert supervisor.status() == 2
    finally:
        done.set()
        thread.join()
    assert "in use by a live run on host farnode" in supervisor.text
    assert "its lease advanced" in supervisor.text
    assert store.get("run") == elsewhere(1).to_text().encode()


def test_a_refused_password_ends_the_start_without_printing_it(stage: Stage) -> None:
    with redis_server("open-sesame") as url:
        wrong = url.replace("open-sesame", "wrong-secret")
        supervisor = stage.start(plan(StoreSpec(kind="redis", address=wrong, space=SPACE), 0))
        assert supervisor.status() == 2
    assert "refused the user or the password" in supervisor.text
    assert "wrong-secret" not in supervisor.text
