"""A supervisor and its workers: real processes, real signals, and who says what."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.stores.store_spec import StoreSpec, run_space
from paceline.errors import ConfigError, DataError, PeerLost
from tests.harness.processes.run_folders import wait_until
from tests.harness.processes.supervisor_stage import FULL, Stage, at_most


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path) as made:
        yield made


@pytest.fixture
def rendezvous(tmp_path: Path) -> StoreSpec:
    folder = tmp_path / "meet"
    folder.mkdir()
    return StoreSpec(kind="folder", address=str(folder), space=run_space("r"))


def machine(number: int, rendezvous: StoreSpec, **changes: object) -> RunPlan:
    """One of two machines, each with one worker."""
    values = {
        "run_id": "r",
        "machine": number,
        "machines": 2,
        "rendezvous": rendezvous,
        "first_iter_timeout": 20.0,
        "timeout": 5.0,
    }
    return RunPlan(**(values | changes))  # type: ignore[arg-type]


def test_a_run_whose_workers_end_well_ends_well(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=2))
    for actor in stage.actors(2):
        actor.send_order("exit 0")
    assert supervisor.status() == 0
    assert supervisor.text == ""


def test_a_workers_own_error_is_said_once_with_rank_and_machine(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=3))
    actors = stage.actors(3)
    actors[1].fail(DataError("record 7 is damaged."))
    assert supervisor.status() == 1
    host = os.uname().nodename
    assert supervisor.text == f"paceline: rank 1 on machine 0 ({host}): record 7 is damaged.\n"
    assert all(actor.ended() for actor in actors)


def test_the_callers_mistake_has_status_2(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=2))
    stage.actors(2)[0].fail(ConfigError("--num_labels 3: too few."))
    assert supervisor.status() == 2


def test_a_lost_peer_is_not_the_cause_that_is_said(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=2))
    first, second = stage.actors(2)
    first.fail(PeerLost("rank 1 ended its connection."))
    assert first.ended()
    second.fail(DataError("record 7 is damaged."))
    assert supervisor.status() == 1
    assert "record 7" in supervisor.text
    assert "ended its connection" not in supervisor.text


@pytest.mark.alone
def test_a_lost_peer_is_said_where_nobody_says_more(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=2))
    with at_most(5):
        stage.actors(2)[0].fail(PeerLost("rank 1 ended its connection."))
        assert supervisor.status() == 1
    assert "rank 0 on machine 0" in supervisor.text


def test_the_cause_is_said_of_a_worker_that_takes_its_time_to_end(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=2))
    first, second = stage.actors(2)
    second.write_failure_report(FailureReport.of_status(3))
    first.fail(PeerLost("rank 1 ended its connection."))
    assert supervisor.status() == 3
    host = os.uname().nodename
    assert supervisor.text == f"paceline: rank 1 on machine 0 ({host}): ended with status 3.\n"


@pytest.mark.alone
def test_a_killed_worker_is_named_with_its_signal(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=2))
    actors = stage.actors(2)
    with at_most(4):
        os.kill(actors[1].pid, signal.SIGKILL)
        assert supervisor.status() == 1
    assert "rank 1 on machine 0" in supervisor.text
    assert "was killed by SIGKILL. If no user killed it, the machine ran out of" in supervisor.text
    assert actors[0].ended()


def test_a_worker_that_leaves_no_word_is_named_with_its_status(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=2))
    stage.actors(2)[1].send_order("exit 7")
    assert supervisor.status() == 7
    assert "ended with status 7" in supervisor.text


def test_the_last_workers_failure_counts_after_the_others_ended_well(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=2))
    first, second = stage.actors(2)
    first.send_order("exit 0")
    assert first.ended()
    second.send_order("exit 3")
    assert supervisor.status() == 3


@pytest.mark.alone
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
)
def test_a_signal_ends_everything(stage: Stage, number: signal.Signals, status: int) -> None:
    supervisor = stage.start(RunPlan(workers=2))
    actors = stage.actors(2)
    with at_most(3):
        supervisor.send(number)
        assert supervisor.status() == status
    assert f"stopped by {number.name}" in supervisor.text
    assert all(actor.ended() for actor in actors)


@pytest.mark.alone
def test_workers_that_dont_hear_sigterm_are_killed_within_five_seconds(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=1))
    (actor,) = stage.actors(1)
    actor.send_order("stubborn")
    assert actor.receive_line() == "stubborn"
    with at_most(5):
        supervisor.send(signal.SIGINT)
        assert supervisor.status() == 130
    assert actor.ended()


def test_a_killed_supervisor_leaves_no_folder_behind(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=1))
    (actor,) = stage.actors(1)
    error_file = Path(actor.environment.error_file)
    assert error_file.exists()
    supervisor.send(signal.SIGKILL)
    assert supervisor.status() == -signal.SIGKILL
    assert actor.ended()
    assert not error_file.parent.exists()


@pytest.mark.alone
def test_a_second_signal_leaves_what_saving_takes(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=1))
    (actor,) = stage.actors(1)
    actor.send_order("stubborn")
    assert actor.receive_line() == "stubborn"
    with at_most(3.9):  # one alone: 4 seconds
        supervisor.send(signal.SIGINT)
        supervisor.send(signal.SIGTERM)
        assert supervisor.status() in (130, 143)  # two that come at once have no order
    assert actor.ended()


@pytest.mark.alone
def test_ctrl_c_reaches_workers_that_wait_in_c_plus_plus(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=2), FULL)
    actors = stage.actors(2)
    for actor in actors:
        actor.send_order("wait in C++")
        assert actor.receive_line() == "waiting"
    with at_most(5):
        supervisor.send(signal.SIGINT)
        assert supervisor.status() == 130
    assert all(actor.ended() for actor in actors)


@pytest.mark.alone
def test_a_killed_supervisor_leaves_no_orphans(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=2), FULL)
    waits, parent = stage.actors(2)
    waits.send_order("wait in C++")
    assert waits.receive_line() == "waiting"
    parent.send_order("have a child")
    assert parent.receive_line() == "born"
    with at_most(2):
        supervisor.send(signal.SIGKILL)
        assert waits.ended()
        assert parent.ended()  # its child holds the connection, too


def test_a_workers_children_end_with_it(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=1), FULL)
    (parent,) = stage.actors(1)
    parent.send_order("have a child")
    assert parent.receive_line() == "born"
    parent.send_order("end")
    assert parent.ended()
    assert supervisor.status() == 0


def test_an_error_that_nobody_foresaw_is_a_traceback_once(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=1), FULL)
    stage.actors(1)[0].send_order("have a bug")
    assert supervisor.status() == 1
    assert supervisor.text.count("KeyError: 'a bug'") == 1
    assert supervisor.text.count("Traceback") == 1


def test_a_command_that_isnt_there_is_a_sentence(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    supervisor = stage.start(RunPlan(workers=2))
    assert supervisor.status() == 2
    assert "/nowhere/python can't be started: No such file" in supervisor.text


@pytest.mark.alone
def test_all_machines_say_the_one_cause(stage: Stage, rendezvous: StoreSpec) -> None:
    supervisors = [stage.start(machine(number, rendezvous)) for number in (0, 1)]
    first, second = stage.actors(2)
    first.fail(PeerLost("rank 1 ended its connection."))
    assert first.ended()
    second.fail(DataError("record 7 is damaged."))
    with at_most(5):
        assert [s.status() for s in supervisors] == [1, 1]
    for supervisor in supervisors:
        assert supervisor.text.count("rank 1 on machine 1") == 1
        assert supervisor.text.count("record 7 is damaged.") == 1
        assert "ended its connection" not in supervisor.text


@pytest.mark.alone
def test_a_signal_on_one_machine_ends_the_others(stage: Stage, rendezvous: StoreSpec) -> None:
    supervisors = [stage.start(machine(number, rendezvous)) for number in (0, 1)]
    actors = stage.actors(2)
    with at_most(5):
        supervisors[1].send(signal.SIGINT)
        assert [s.status() for s in supervisors] == [130, 130]
    assert all("stopped by SIGINT on machine 1" in s.text for s in supervisors)
    assert all(actor.ended() for actor in actors)
    assert os.listdir(rendezvous.address) == []


def test_a_lost_rendezvous_ends_no_run(stage: Stage, rendezvous: StoreSpec) -> None:
    supervisor = stage.start(machine(0, rendezvous, machines=1))
    (actor,) = stage.actors(1)
    os.rename(rendezvous.address, f"{rendezvous.address}.gone")
    while "the rendezvous is lost" not in supervisor.text:
        assert supervisor.status(within=0.1) is None
    actor.send_order("exit 0")
    assert supervisor.status() == 0
    assert supervisor.text.count("the rendezvous is lost") == 1


def stopped(*pids: int | None) -> bool:
    """Return whether all these processes are stopped."""
    states = {psutil.Process(pid).status() for pid in pids}
    return states == {psutil.STATUS_STOPPED}


def test_ctrl_z_stops_the_workers_with_their_supervisor_and_continues_them(stage: Stage) -> None:
    """As in https://github.com/hephbuild/heph/issues/354."""
    supervisor = stage.start(RunPlan(workers=2))
    actors = stage.actors(2)
    pids = [supervisor.process.pid, *(actor.pid for actor in actors)]
    for _ in range(2):
        supervisor.send(signal.SIGTSTP)
        wait_until(lambda: stopped(*pids))
        supervisor.send(signal.SIGCONT)
        wait_until(lambda: not any(stopped(pid) for pid in pids))
    for actor in actors:
        actor.send_order("exit 0")
    assert supervisor.status() == 0


def test_workers_that_are_stopped_end_with_a_supervisor_that_is_killed(stage: Stage) -> None:
    supervisor = stage.start(RunPlan(workers=2), FULL)
    actors = stage.actors(2)
    supervisor.send(signal.SIGTSTP)
    wait_until(lambda: stopped(supervisor.process.pid, *(actor.pid for actor in actors)))
    supervisor.send(signal.SIGKILL)
    assert all(actor.ended() for actor in actors)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_by_which_a_scheduler_announces_an_end_ends_nothing(
    stage: Stage, number: signal.Signals
) -> None:
    """As in https://github.com/pytorch/pytorch/issues/154849."""
    supervisor = stage.start(RunPlan(workers=1))
    (actor,) = stage.actors(1)
    supervisor.send(number)
    actor.send_order("exit 0")
    assert supervisor.status() == 0
