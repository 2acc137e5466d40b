"""Values of the cluster: ranks, environments, plans, and which of several failures is the cause."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from paceline.cluster.environment import (
    WORKER_VARIABLE,
    WorkerEnvironment,
    environment_of,
    read_environment,
)
from paceline.cluster.membership.generation import Generation, Group
from paceline.cluster.rendezvous.machine_rendezvous import serve
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.failure_report import FailureReport, cause
from paceline.cluster.stores.store_spec import StoreSpec, open_store
from paceline.config.world import WorldConfig
from paceline.errors import CommTimeout, ConfigError, DataError, PeerLost
from tests.harness.processes.worlds import world_of

MACHINES = (2, 1, 3)


def member(rank: int) -> Group:
    return world_of(MACHINES, rank, addresses=("10.0.0.1", "10.0.0.2", "10.0.0.3"))


def test_ranks_are_counted_machine_by_machine() -> None:
    world = [member(rank) for rank in range(6)]
    (generation,) = {group.generation for group in world}
    assert [group.rank for group in world] == [0, 1, 2, 3, 4, 5]
    assert [group.local_rank for group in world] == [0, 1, 0, 0, 1, 2]
    assert [group.local_world_size for group in world] == [2, 2, 1, 3, 3, 3]
    assert {group.size for group in world} == {generation.world_size} == {6}
    assert [generation.machine_of(rank) for rank in range(6)] == [0, 0, 1, 2, 2, 2]
    assert [generation.rank_of(group.machine, group.local_rank) for group in world] == [*range(6)]
    assert generation.workers_per_machine == MACHINES
    assert member(4).address == "10.0.0.3"
    assert generation.describe(4) == "rank 4 on machine 2 (c)"
    later = replace(generation, number=3, first_start=0, members=generation.members[1:])
    assert later.describe(3) == "rank 3 of generation 3 on machine 2 (c)"
    assert (generation.leader.machine, generation.leader.local_rank) == (0, 0)
    assert generation.contributors == generation.owners == (0, 1, 2, 3, 4, 5)


def test_the_workers_of_a_machine_are_a_group_with_ranks_of_its_own() -> None:
    groups = [member(rank).on_machine() for rank in range(6)]
    assert [group.ranks for group in groups] == [*((0, 1),) * 2, (2,), *((3, 4, 5),) * 3]
    assert [group.rank for group in groups] == [0, 1, 0, 0, 1, 2]
    assert [group.size for group in groups] == [2, 2, 1, 3, 3, 3]
    assert [group.machine for group in groups] == [0, 0, 1, 2, 2, 2]


def test_each_member_has_an_id_of_its_own() -> None:
    assert len({each.id for each in member(0).generation.members}) == 6


def test_members_that_arent_counted_machine_by_machine_are_a_bug() -> None:
    generation = member(0).generation
    with pytest.raises(AssertionError):
        replace(generation, members=generation.members[::-1])
    with pytest.raises(AssertionError):
        replace(generation, members=generation.members[:1] * 2)


def test_a_generation_survives_the_store() -> None:
    generation = member(0).generation
    assert Generation.from_text(generation.to_text()) == generation


def test_keys_differ_by_token_and_dont_show_it() -> None:
    generation = replace(member(0).generation, token="secret")
    assert generation.key_prefix != replace(generation, token="another").key_prefix
    assert "secret" not in generation.key_prefix + repr(generation)


def test_the_number_of_a_generation_may_come_after_its_first_keys() -> None:
    generation = member(0).generation
    assert replace(generation, number=7).key_prefix == generation.key_prefix


def test_all_members_derive_the_same_token_for_a_join_and_another_one_for_the_next() -> None:
    members = [replace(member(rank).generation, token="secret") for rank in range(3)]
    joins = [{each.with_token_of_join(join).token for each in members} for join in range(3)]
    assert [len(tokens) for tokens in joins] == [1, 1, 1]
    of_another_job = replace(member(0).generation, token="another").with_token_of_join(0).token
    assert len(set.union(*joins, {"secret", of_another_job})) == 5


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
        serve(by_launcher, (), "MASTER_PORT")


def test_a_plan_for_one_machine_needs_no_rendezvous() -> None:
    plan = RunPlan.of(WorldConfig(distributed_interfaces="eth0, ib0"), workers=1)
    assert plan.rendezvous is None
    assert plan.interfaces == ("eth0", "ib0")
