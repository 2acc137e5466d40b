"""The end of a run of two machines, of which one is killed before it has marked its run folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import pytest

from paceline.cluster.rendezvous.deadline import Deadline
from paceline.cluster.rendezvous.leader import take_over
from paceline.cluster.rendezvous.machine_rendezvous import (
    answer_finished,
    registration_of,
    serve_if_needed,
)
from paceline.cluster.rendezvous.reachability import ProbeListener
from paceline.cluster.rendezvous.registered_machine import FINISHED, RegisteredMachine
from paceline.cluster.stores.store_spec import StoreSpec
from tests.harness.network.rendezvous import KINDS, left_behind, plan, rendezvous_of
from tests.harness.processes.supervisor_stage import Actor, Stage, Supervisor

HOST = os.uname().nodename


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path) as made:
        yield made


@pytest.fixture(params=KINDS)
def rendezvous(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreSpec]:
    with rendezvous_of(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def marks(tmp_path: Path) -> list[Path]:
    """Each machine's mark; they share no folder."""
    return [tmp_path / f"finished.{machine}" for machine in (0, 1)]


def started(
    stage: Stage, rendezvous: StoreSpec, marks: list[Path]
) -> tuple[list[Supervisor], list[Actor]]:
    """Start both machines with a worker each."""
    machines = [
        stage.start(plan(rendezvous, machine, timeout=1.0), finish=marks[machine])
        for machine in (0, 1)
    ]
    return machines, stage.actors(2)


def end(actor: Actor) -> None:
    actor.send_order("exit 0")
    assert actor.ended()


def kill(supervisor: Supervisor) -> None:
    supervisor.send(signal.SIGKILL)
    assert supervisor.status() == -signal.SIGKILL


def test_all_machines_mark_the_end(stage: Stage, rendezvous: StoreSpec, marks: list[Path]) -> None:
    machines, actors = started(stage, rendezvous, marks)
    end(actors[1])
    assert not any(mark.exists() for mark in marks)  # machine 0 still trains
    end(actors[0])
    assert [machine.status() for machine in machines] == [0, 0]
    assert all(mark.exists() for mark in marks)
    assert left_behind(rendezvous) == []


def test_a_machine_killed_before_its_mark_learns_that_the_run_is_finished(
    stage: Stage, rendezvous: StoreSpec, marks: list[Path]
) -> None:
    machines, actors = started(stage, rendezvous, marks)
    end(actors[1])
    kill(machines[1])
    end(actors[0])
    assert machines[0].status() == 0
    assert [mark.exists() for mark in marks] == [True, False]
    back = stage.start(plan(rendezvous, 1, begun=True), finish=marks[1])
    answer_finished(plan(rendezvous, 0), limit=60)  # until it has come, and no longer
    assert back.status() == 0
    assert back.text.splitlines()[-1] == (
        "paceline: run r is finished; give another --run_id to train again, or more --num_epochs."
    )
    assert marks[1].exists()
    assert left_behind(rendezvous) == []


def test_a_machine_that_registers_before_the_mark_learns_that_the_run_is_finished(
    stage: Stage, rendezvous: StoreSpec, marks: list[Path]
) -> None:
    own, limit = plan(rendezvous, 0), Deadline(30, "")
    server, address = serve_if_needed(own)  # the server lives as long as its variable
    with ExitStack() as undo:
        registration = registration_of(own, undo.enter_context(closing(ProbeListener())))
        start_id = take_over(own, address, registration, limit)
        registered = RegisteredMachine(own, address, start_id, registration)
        undo.callback(registered.abandon)
        back = stage.start(plan(rendezvous, 1, begun=True), finish=marks[1])
        registered.store.wait(["machine/1"], timedelta(seconds=30))
        registered.store.set(FINISHED, "1")
        registered.store.set(registered.key("left"), "1")
        assert back.status() == 0
    del server
    assert marks[1].exists()
    assert left_behind(rendezvous) == []


def test_where_machine_0_was_killed_before_its_mark_nobody_says_finished(
    stage: Stage, rendezvous: StoreSpec, marks: list[Path]
) -> None:
    machines, actors = started(stage, rendezvous, marks)
    end(actors[1])
    kill(machines[0])
    assert machines[1].status() == 1
    assert f"machine 0 ({HOST}) didn't confirm that the run is finished (" in machines[1].text
    assert "start the same command again on all machines." in machines[1].text
    assert not any(mark.exists() for mark in marks)


def test_a_new_run_of_a_finished_ones_name_isnt_finished(
    stage: Stage, tmp_path: Path, marks: list[Path]
) -> None:
    with rendezvous_of("folder", tmp_path) as folder:
        machines, actors = started(stage, folder, marks)
        end(actors[1])
        kill(machines[1])
        end(actors[0])
        assert machines[0].status() == 0
        new = [stage.start(plan(folder, machine), finish=marks[machine]) for machine in (1, 0)]
        for actor in stage.actors(2):
            actor.send_order("exit 0")
        assert [machine.status() for machine in new] == [0, 0]
        assert not any("is finished" in machine.text for machine in new)


def test_nobody_who_asks_is_no_error(tmp_path: Path) -> None:
    with rendezvous_of("folder", tmp_path) as folder:
        answer_finished(plan(folder, 0), limit=0.3)
        assert left_behind(folder) == []
