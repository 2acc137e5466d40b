"""A run at machine 0's TCP store: processes that stop, and processes that don't belong to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from paceline.cluster.rendezvous.machine_rendezvous import serve_if_needed
from paceline.cluster.rendezvous.registration import RunRecord
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.failure_report import FAILURE, FailureReport
from paceline.cluster.stores.store_spec import StoreSpec, open_store
from paceline.cluster.stores.tcp_store import split_address
from tests.harness.network.rendezvous import SPACE, plan, rendezvous_of
from tests.harness.processes.supervisor_stage import Actor, Stage, Supervisor, at_most

LIMIT = timedelta(seconds=5)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path) as made:
        yield made


@pytest.fixture
def rendezvous(tmp_path: Path) -> Iterator[StoreSpec]:
    with rendezvous_of("tcp", tmp_path) as made:
        yield made


def formed(stage: Stage, rendezvous: StoreSpec) -> tuple[list[Supervisor], list[Actor]]:
    """Two machines with a worker each."""
    machines = [
        stage.start(plan(rendezvous, machine), finish=Path(f"{stage.folder}/mark.{machine}"))
        for machine in (0, 1)
    ]
    return machines, stage.actors(2)


def said(supervisor: Supervisor, text: str) -> bool:
    while text not in supervisor.text:
        if supervisor.status(within=0.05) is not None:
            return text in supervisor.text
    return True


def test_a_stopped_machine_0_keeps_no_other_at_the_runs_end(
    stage: Stage, rendezvous: StoreSpec
) -> None:
    machines, actors = formed(stage, rendezvous)
    machines[0].send(signal.SIGSTOP)
    actors[1].send_order("exit 0")
    with at_most(20):
        assert machines[1].status() == 1
    assert f"machine 0 ({os.uname().nodename}) didn't confirm that the run is" in machines[1].text
    assert "start the same command again on all machines." in machines[1].text


def test_a_signal_ends_a_machine_whose_machine_0_is_stopped(
    stage: Stage, rendezvous: StoreSpec
) -> None:
    machines, actors = formed(stage, rendezvous)
    machines[0].send(signal.SIGSTOP)
    machines[1].send(signal.SIGTERM)
    with at_most(20):
        assert machines[1].status() == 128 + signal.SIGTERM
    assert actors[1].ended()


def test_a_stopped_machine_0_keeps_no_other_at_the_start(
    stage: Stage, rendezvous: StoreSpec
) -> None:
    first = stage.start(plan(rendezvous, 0, 3))
    assert said(first, "waiting for machines 1, 2 of 3")
    second = stage.start(plan(rendezvous, 1, 3, first_iter_timeout=4.0))
    assert said(second, "waiting for machine 2 of 3")
    first.send(signal.SIGSTOP)
    third = stage.start(plan(rendezvous, 2, 3, first_iter_timeout=4.0))
    with at_most(25):
        assert [second.status(), third.status()] == [1, 1]
    assert "machine 0 of 3" in third.text


def write_failure(rendezvous: StoreSpec, record: bytes) -> None:
    """Write, with torch's own client, that the run failed with status 0."""
    client = TCPStore(*split_address(rendezvous.address), is_master=False, timeout=LIMIT)
    inside = PrefixStore(f"{SPACE}/{RunRecord.from_text(record).generation}", client)
    inside.set(FAILURE, FailureReport(text="all is well.", status=0).to_text())


def test_a_failure_with_status_0_is_no_good_end(stage: Stage, rendezvous: StoreSpec) -> None:
    machines, _ = formed(stage, rendezvous)
    record = open_store(rendezvous, LIMIT).get("run")
    write_failure(rendezvous, record)
    assert [machine.status() for machine in machines] == [1, 1]


def test_a_process_without_the_secret_ends_no_run(stage: Stage, rendezvous: StoreSpec) -> None:
    rendezvous = replace(rendezvous, secret="open sesame")
    machines, actors = formed(stage, rendezvous)
    write_failure(rendezvous, open_store(rendezvous, LIMIT).get("run"))
    assert all(said(m, "written without this run's secret") for m in machines)
    for actor in actors:
        actor.send_order("exit 3")
    assert [machine.status() for machine in machines] == [3, 3]


def test_two_runs_at_once_on_a_machine_have_ports_of_their_own() -> None:
    hosted = [serve_if_needed(RunPlan()) for _ in range(2)]
    ports = {split_address(spec.address)[1] for _, spec in hosted}
    assert len(ports) == 2
    assert all(spec.address.startswith("127.0.0.1:") for _, spec in hosted)


def test_a_run_without_a_secret_warns_once_where_others_reach_its_port(
    rendezvous: StoreSpec, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        place = "paceline.cluster.rendezvous.machine_rendezvous.listening_address"
        patch.setattr(place, lambda name, available, interface_names: "")
        for spec in (replace(rendezvous, secret="open sesame"), rendezvous):
            server, _ = serve_if_needed(plan(spec, 0))
            del server
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "any process that reaches port" in lines[0]
    assert "PACELINE_SECRET" in lines[0]
    serve_if_needed(plan(rendezvous, 0))
    assert capfd.readouterr().err == ""  # on 127.0.0.1 only this machine's users reach it
