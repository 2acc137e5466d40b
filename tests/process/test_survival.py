"""Workers that outlive their supervisor, their wrapper and each other: real `kill -9`."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.errors import DataError, PeerLost
from tests.harness.network.rendezvous import plan, rendezvous_of
from tests.harness.processes.supervisor_stage import (
    SURVIVING,
    Actor,
    Stage,
    Supervisor,
    at_most,
)

HOST = os.uname().nodename
CONTINUE = " The others decide how the run continues."


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path) as made:
        yield made


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_supervisor(supervisor: Supervisor) -> None:
    supervisor.send(signal.SIGKILL)
    assert supervisor.status() == -signal.SIGKILL


def survivors(
    stage: Stage, workers: int, *, wrapped: bool = False, exits: Path | None = None
) -> tuple[Supervisor, list[Actor]]:
    """Start a machine whose workers have declared that their world survives a loss."""
    supervisor = stage.start(RunPlan(workers=workers), SURVIVING, wrapped=wrapped, exits=exits)
    actors = stage.actors(workers)
    for actor in actors:
        actor.obey("survive")
    return supervisor, actors


def await_text(supervisor: Supervisor, words: str) -> None:
    while words not in supervisor.text:
        assert supervisor.status(within=0.05) is None, supervisor.text


def test_a_declared_worker_outlives_its_supervisor_and_another_doesnt(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=2), SURVIVING)
    declared, other = stage.actors(2)
    declared.obey("survive")
    kill_supervisor(supervisor)
    assert other.ended()
    assert declared.receive_line() == "outlived"
    declared.obey("still-there")


def test_a_declared_worker_and_its_wrapper_outlive_their_supervisor(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=2), SURVIVING, wrapped=True)
    declared, other = stage.actors(2)
    declared.obey("survive")
    wrapper = psutil.Process(declared.pid).parent()
    kill_supervisor(supervisor)
    assert other.ended()
    assert declared.stays(0.3)
    assert wrapper is not None
    assert wrapper.is_running()


@pytest.mark.parametrize(("orders", "status"), [(("close",), 0), ((), 1)])
def test_a_declared_worker_outlives_its_wrapper(
    stage: Stage, orders: tuple[str, ...], status: int
) -> None:
    supervisor, (actor,) = survivors(stage, 1, wrapped=True)
    kill(psutil.Process(actor.pid).ppid())
    assert actor.stays(0.3)
    assert supervisor.status(within=0) is None
    actor.obey(*orders)
    actor.send_order("exit 0")
    assert supervisor.status() == status
    assert ("ended without a report" in supervisor.text) == bool(status)


def test_another_worker_ends_with_its_wrapper(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=1), SURVIVING, wrapped=True)
    (actor,) = stage.actors(1)
    kill(psutil.Process(actor.pid).ppid())
    assert actor.ended()
    assert supervisor.status() == 1
    assert "was killed by SIGKILL" in supervisor.text


@pytest.mark.alone
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_signal_ends_declared_workers_within_five_seconds(
    stage: Stage, number: signal.Signals, status: int, wrapped: bool
) -> None:
    supervisor, actors = survivors(stage, 2, wrapped=wrapped)
    with at_most(5):
        supervisor.send(number)
        assert supervisor.status() == status
        assert all(actor.ended() for actor in actors)


@pytest.mark.alone
def test_a_supervisor_that_is_killed_while_it_ends_the_run_leaves_no_worker(stage: Stage) -> None:
    supervisor, actors = survivors(stage, 2)
    for actor in actors:
        actor.obey("stubborn")
    supervisor.send(signal.SIGTERM)
    await_text(supervisor, "stopped by SIGTERM")
    kill_supervisor(supervisor)
    with at_most(2):
        assert all(actor.ended() for actor in actors)


def test_a_lost_worker_ends_no_other(stage: Stage, tmp_path: Path) -> None:
    supervisor, actors = survivors(stage, 3, exits=tmp_path / "exits")
    kill(actors[1].pid)
    await_text(supervisor, CONTINUE)
    actors[0].obey("still-there")
    for actor in (actors[0], actors[2]):
        actor.send_order("exit 0")
    assert supervisor.status() == 0
    lost = f"rank 1 on machine 0 ({HOST})"
    first, second = supervisor.text.splitlines()
    assert first.startswith(f"paceline: {lost} was killed by SIGKILL.")
    assert second == f"paceline: the run is finished; it continued without {lost}."
    exits = (tmp_path / "exits").read_text().splitlines()
    assert exits[0].startswith(f"1 failed: {lost} was killed by SIGKILL.")
    ended = [
        f"{rank} well: rank {rank} on machine 0 ({HOST}) ended with status 0." for rank in (0, 2)
    ]
    assert sorted(exits[1:3]) == ended
    assert exits[3:] == ["closed"]


def test_a_loss_is_said_before_the_others_continue(stage: Stage, tmp_path: Path) -> None:
    supervisor, actors = survivors(stage, 2, exits=tmp_path / "supervisor0.log")
    kill(actors[1].pid)
    await_text(supervisor, "1 failed: ")
    said, reported = supervisor.text.splitlines()
    assert said.startswith(f"paceline: rank 1 on machine 0 ({HOST}) was killed by SIGKILL.")
    assert reported == f"1 failed: {said.removeprefix('paceline: ').removesuffix(CONTINUE)}"


def test_a_machine_that_lost_all_its_workers_names_the_cause(stage: Stage) -> None:
    supervisor, (first, second) = survivors(stage, 2)
    kill(second.pid)
    await_text(supervisor, CONTINUE)
    first.fail(PeerLost("rank 1 ended its connection."))
    assert supervisor.status() == 1
    (last,) = supervisor.text.splitlines()[1:]
    assert "rank 1 on machine 0" in last
    assert "was killed by SIGKILL" in last


def test_a_worker_that_lost_its_peers_ends_no_other(stage: Stage) -> None:
    supervisor, (first, second) = survivors(stage, 2)
    first.fail(PeerLost("the members expelled this one."))
    await_text(supervisor, CONTINUE)
    second.send_order("exit 0")
    assert supervisor.status() == 0


def test_an_error_of_a_workers_own_ends_the_run(stage: Stage) -> None:
    supervisor, (first, second) = survivors(stage, 2)
    first.fail(DataError("record 7 is damaged."))
    assert supervisor.status() == 1
    assert supervisor.text == f"paceline: rank 0 on machine 0 ({HOST}): record 7 is damaged.\n"
    assert second.ended()


@pytest.mark.parametrize("kind", ["folder", "tcp"])
def test_a_machine_finishes_after_the_loss_of_machine_0(
    stage: Stage, tmp_path: Path, kind: str
) -> None:
    marks = [tmp_path / f"finished.{machine}" for machine in (0, 1)]
    with rendezvous_of(kind, tmp_path) as place:
        machines = [
            stage.start(plan(place, machine, timeout=30.0), SURVIVING, finish=marks[machine])
            for machine in (0, 1)
        ]
        lost, left = stage.actors(2)
        left.obey("survive")
        kill_supervisor(machines[0])
        assert lost.ended()
        left.send_order("exit 0")
        with at_most(20):  # ten of them are machine 0's to confirm
            assert machines[1].status() == 0, machines[1].text
    assert not marks[0].exists()
    assert marks[1].read_text() == "unconfirmed"


def test_both_machines_finish_after_the_loss_of_the_folder_in_which_they_met(
    stage: Stage, tmp_path: Path
) -> None:
    marks = [tmp_path / f"finished.{machine}" for machine in (0, 1)]
    with rendezvous_of("folder", tmp_path) as place:
        machines = [
            stage.start(plan(place, machine, timeout=30.0), SURVIVING, finish=marks[machine])
            for machine in (0, 1)
        ]
        actors = stage.actors(2)
        for actor in actors:
            actor.obey("survive")
        shutil.rmtree(Path(place.address).rename(tmp_path / "removed"))
        for actor in actors:
            actor.send_order("exit 0")
        for machine in machines:
            assert machine.status() == 0, machine.text
    assert [mark.read_text() for mark in marks] == ["confirmed", "confirmed"]


@pytest.mark.parametrize("kind", ["folder", "tcp"])
def test_machine_0_finishes_after_the_loss_of_another(
    stage: Stage, tmp_path: Path, kind: str
) -> None:
    marks = [tmp_path / f"finished.{machine}" for machine in (0, 1)]
    with rendezvous_of(kind, tmp_path) as place:
        machines = [
            stage.start(plan(place, machine, timeout=30.0), SURVIVING, finish=marks[machine])
            for machine in (0, 1)
        ]
        left, lost = stage.actors(2)
        left.obey("survive")
        kill_supervisor(machines[1])
        assert lost.ended()
        left.send_order("exit 0")
        with at_most(20):  # and not the timeout
            assert machines[0].status() == 0, machines[0].text
    assert [mark.exists() for mark in marks] == [True, False]


def test_a_machine_without_workers_ends_no_other(stage: Stage, tmp_path: Path) -> None:
    with rendezvous_of("folder", tmp_path) as place:
        machines = [stage.start(plan(place, machine), SURVIVING) for machine in (0, 1)]
        actors = stage.actors(2)
        for actor in actors:
            actor.obey("survive")
        kill(actors[1].pid)
        assert machines[1].status() == 1
        assert "was killed by SIGKILL" in machines[1].text
        assert actors[0].stays(1.2)  # two beats, in which a posted failure is seen
        actors[0].send_order("exit 0")
        assert machines[0].status() == 0
