"""Values of the cluster: ranks, environments, plans, and which of several failures is the cause."""

from __future__ import annotations

from datetime import timedelta

import pytest

from paceline.cluster.environment import (
    WORKER_VARIABLE,
    WorkerEnvironment,
    environment_of,
    read_environment,
)
from paceline.cluster.membership.members import Members
from paceline.cluster.rendezvous.machine_rendezvous import serve
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.store_spec import StoreSpec, open_store
from paceline.cluster.supervision.failure_report import FailureReport, cause
from paceline.config.world import WorldConfig
from paceline.errors import CommTimeout, ConfigError, DataError, PeerLost

MACHINES = (2, 1, 3)


def member(machine: int, local_rank: int) -> Members:
    return Members.on(
        machine,
        local_rank,
        workers_per_machine=MACHINES,
        addresses=("10.0.0.1", "10.0.0.2", "10.0.0.3"),
        hosts=("a", "b", "c"),
    )


def test_ranks_are_counted_machine_by_machine() -> None:
    world = [member(m, local) for m, count in enumerate(MACHINES) for local in range(count)]
    assert [m.rank for m in world] == [0, 1, 2, 3, 4, 5]
    assert [m.local_rank for m in world] == [0, 1, 0, 0, 1, 2]
    assert [m.local_world_size for m in world] == [2, 2, 1, 3, 3, 3]
    assert {m.world_size for m in world} == {6}
    assert [world[0].machine_of(rank) for rank in range(6)] == [0, 0, 1, 2, 2, 2]
    assert member(2, 1).address == "10.0.0.3"
    assert member(0, 0).describe(4) == "rank 4 on machine 2 (c)"


def test_members_that_contradict_themselves_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        Members(
            generation=0,
            rank=1,
            world_size=2,
            local_rank=0,
            local_world_size=2,
            machine=0,
            workers_per_machine=(2,),
            addresses=("127.0.0.1",),
            hosts=("a",),
        )


def test_a_world_may_have_one_worker() -> None:
    assert (Members.alone().world_size, Members.alone().address) == (1, "127.0.0.1")


def test_what_a_supervisor_gives_a_worker_survives_its_environment() -> None:
    worker = WorkerEnvironment(
        run_id="r",
        start_id="abc",
        machine=1,
        local_rank=0,
        store=StoreSpec(kind="redis", address="redis://:secret@h:1/0", space="paceline-r/abc"),
        first_iter_timeout=20.0,
        timeout=10.0,
        error_file="error.json",
    )
    assert read_environment(environment_of(worker)).worker == worker
    assert "secret" not in repr(worker)
    assert set(environment_of(worker)) >= {WORKER_VARIABLE, "PATH"}
    assert read_environment({}).worker is None


def test_the_cause_is_the_first_failure_that_follows_from_no_other() -> None:
    lost = FailureReport.of(PeerLost("rank 0 ended"))
    late = FailureReport.of(CommTimeout("rank 0 said nothing"))
    damaged = FailureReport.of(DataError("record 7"))
    assert cause([lost, damaged, late]) == damaged
    assert cause([late, lost]) == late
    assert cause([]) is None


def test_our_errors_are_sentences_and_others_are_tracebacks() -> None:
    assert FailureReport.of(ConfigError("--seed -1: …")) == FailureReport(
        text="--seed -1: …", status=2
    )
    try:
        raise KeyError("k")
    except KeyError as error:
        failure = FailureReport.of(error)
    assert failure.status == 1
    assert failure.text.startswith("Traceback")
    assert failure.text.endswith("KeyError: 'k'")


@pytest.mark.parametrize(
    ("flags", "kind", "address"),
    [
        ({"redis_host": "h"}, "redis", "redis://h:6379/0"),
        ({"redis_url": "rediss://:pw@h:1/2"}, "redis", "rediss://:pw@h:1/2"),
        ({"master": "h:29500"}, "tcp", "h:29500"),
        ({"file_store_path": "/nfs/meet"}, "folder", "/nfs/meet"),
    ],
)
def test_a_plans_rendezvous_is_the_one_that_the_flags_name(
    flags: dict[str, str], kind: str, address: str
) -> None:
    world = WorldConfig(
        num_shards=2,
        shard_id=1,
        run_id="a/b".replace("/", " "),
        num_workers=3,
        **flags,  # type: ignore[arg-type]
    )
    plan = RunPlan.of(world, workers=world.workers)
    assert plan.rendezvous == StoreSpec(kind=kind, address=address, space="paceline-a%20b")  # type: ignore[arg-type]
    assert (plan.machine, plan.machines, plan.workers) == (1, 2, 3)


def test_a_wrong_address_is_named_with_its_flag_or_variables() -> None:
    with pytest.raises(ConfigError, match=r"^--master node0: give it as HOST:PORT"):
        RunPlan.of(WorldConfig(num_shards=2, run_id="r", master="node0"), workers=1)
    by_launcher = StoreSpec(kind="tcp", address=":29500", space="r")  # an empty MASTER_ADDR
    with pytest.raises(ConfigError, match=r"^MASTER_ADDR:MASTER_PORT :29500: give it as HOST:PORT"):
        open_store(by_launcher, timedelta(seconds=1))
    with pytest.raises(ConfigError, match=r"^MASTER_ADDR:MASTER_PORT :29500: give it as HOST:PORT"):
        serve(by_launcher, (), print, "MASTER_PORT")


def test_a_plan_for_one_machine_needs_no_rendezvous() -> None:
    plan = RunPlan.of(WorldConfig(distributed_interfaces="eth0, ib0"), workers=1)
    assert plan.rendezvous is None
    assert plan.interfaces == ("eth0", "ib0")
