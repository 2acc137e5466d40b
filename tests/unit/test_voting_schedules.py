"""The vote on the next generation over random schedules, and mutants that such schedules find.

`python -m tests.harness.membership.check` runs as many schedules as one likes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.voting.messages import machine_name
from paceline.cluster.membership.voting.successor import View
from tests.harness.membership.check import found_by
from tests.harness.membership.endings import is_promised, train_on
from tests.harness.membership.mutants import MUTANTS
from tests.harness.membership.processes import Faults, Message
from tests.harness.membership.schedules import run_schedule
from tests.harness.membership.world import World

SCHEDULES, PARTS = 6_000, 3
OFTEN = {
    "lost messages": 1500,
    "reordered messages": 3000,
    "duplicated messages": 150,
    "delayed messages": 8000,
    "pauses": 400,
    "partitions": 800,
    "killed workers": 1200,
    "killed supervisors": 500,
    "killed machines": 500,
    "false suspicions": 1500,
    "expelled members that live": 600,
    "lost witnesses": 400,
    "committed snapshots": 10_000,
    "durable starts": 15,
    "joiners": 80,
    "leavers": 40,
    "planned changes": 400,
    "complete copies": 200,
    "generations": 1500,
    "chains of three generations": 300,
    "chains of four generations": 40,
    "schedules that must go on": 1000,
}
"""How often each thing happens, at least, in a third of the schedules: half of what was counted."""

FIRST = {
    "a quorum of N/2": 375,
    "a write-once witness asked at the end": 1_195,
    "answering before recording": 3_640,
    "a witness whose nonce is ignored": 415,
    "a witness that takes lower generations": 8_055,
    "a restarted supervisor that reports an empty record": 500,
    "keeping the two newest snapshots": 30,
    "snapshots named by step alone": 185,
    "not dropping what lies beyond a start": 70,
    "dropping a snapshot that the record lists": 12_620,
    "a durable start whose step isn't decided": 65,
    "a witness that is silent on lower generations": 22_740,
}
"""The seeds a little before those that find a mutant; `docs/concepts/membership.md` counts from 0.

They hold as long as a seed names one schedule, in all processes.
"""


@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_breaks_the_protocol(part: int) -> None:
    each = SCHEDULES // PARTS
    happened = Counter[str]()
    for seed in range(part * each, (part + 1) * each):
        outcome = run_schedule(seed)  # it raises a violation
        happened += outcome.happened
        happened["schedules that must go on"] += outcome.promised
    rare = {name: happened[name] for name, least in OFTEN.items() if happened[name] < least}
    assert not rare


@pytest.mark.parametrize("name", MUTANTS)
def test_schedules_find_the_mutant(name: str) -> None:
    first = FIRST.get(name, 0)
    assert found_by(MUTANTS[name], range(first, first + 30)) is not None


NO_FAULTS = Faults()


def trained(
    shape: tuple[int, ...], seed: int, *, witness: bool, faults: Faults = NO_FAULTS
) -> World:
    """Return a run in mid-training."""
    rng = random.Random(seed)
    interval = rng.choice((1, 2))
    world = World(rng, shape, faults=faults, interval=interval, witness=witness, parts=True)
    for _ in range(rng.randrange(4, 30)):
        for worker in world.workers:
            world.training.exchange(worker, 0.7)
            world.training.step(worker)
    return world


def begin_votes(world: World) -> None:
    """Let those that are left vote in any order, as far as they get, on true evidence."""
    rng = world.rng
    for _ in range(rng.randrange(40)):
        worker = rng.choice(world.workers)
        dead = frozenset(m.id for m in worker.generation.members if not world.by_id[m.id].alive)
        if dead and worker.trains and rng.random() < 0.2:
            world.propose(worker, View(suspected=dead))
        elif world.flight:
            world.deliver(rng.randrange(len(world.flight)))
        else:
            world.enter(worker)


def lose_machine_0(world: World) -> None:
    world.kill_machine(world.machines[0])


def lose_machine_1(world: World) -> None:
    world.kill_machine(world.machines[1])


def lose_rank_0_and_its_supervisor(world: World) -> None:
    world.kill(world.workers[0])
    world.kill_supervisor(world.machines[0])


def lose_all_workers_of_machine_0_but_the_last(world: World) -> None:
    for worker in world.machines[0].workers[:-1]:
        world.kill(worker)


@pytest.mark.parametrize(
    ("shape", "witness", "lose"),
    [
        pytest.param((1, 1), True, lose_machine_0, id="first of a pair, with a witness"),
        pytest.param((1, 1), True, lose_machine_1, id="second of a pair, with a witness"),
        pytest.param((1, 1), False, lose_machine_1, id="one without the casting vote"),
        pytest.param((2, 1), True, lose_machine_0, id="the larger of 2 + 1 workers"),
        pytest.param((2,), False, lose_rank_0_and_its_supervisor, id="rank 0 and supervisor"),
        pytest.param((2, 1), False, lose_rank_0_and_its_supervisor, id="both, of two machines"),
        pytest.param((1, 1, 1), False, lose_rank_0_and_its_supervisor, id="both, of three"),
        pytest.param((3,), False, lose_all_workers_of_machine_0_but_the_last, id="all but one"),
        pytest.param(
            (3, 1), False, lose_all_workers_of_machine_0_but_the_last, id="all here but one"
        ),
    ],
)
def test_a_run_goes_on_wherever_the_text_promises_it(
    shape: tuple[int, ...], witness: bool, lose: Callable[[World], None]
) -> None:
    for seed in range(100):
        world = trained(shape, seed, witness=witness)
        lose(world)
        begin_votes(world)
        assert is_promised(world, fair=True)
        assert train_on(world), f"schedule {seed}"
        world.oracle.check_ledger()


def test_a_pair_that_loses_the_casting_machine_has_no_successor() -> None:
    for seed in range(100):
        world = trained((1, 1), seed, witness=False)
        lose_machine_0(world)
        begin_votes(world)
        assert not is_promised(world, fair=True)
        assert not train_on(world)
        assert not world.oracle.successors


@pytest.mark.parametrize("asks_all", [True, False])
def test_a_run_goes_on_if_only_a_joiners_supervisor_knows_the_outcome(asks_all: bool) -> None:
    """A schedule that broke the rule that a proposer asks the acceptors of its generation alone."""
    world = trained((1, 1), 1, witness=False, faults=Faults(asks_acceptors_only=not asks_all))
    leader = world.workers[0]
    world.join(leader, None)
    joiners = tuple(joiner for _, joiner in world.joiners[world.first.id])
    world.propose(leader, View(joiners=joiners))
    deliver(world, lambda message: not isinstance(message.content, Generation))
    deliver(world, lambda message: message.to == machine_name(2))
    world.lose_outcomes()
    assert world.oracle.newest.machines == (0, 1, 2)

    world.kill_machine(world.machines[0])
    for worker in world.machines[2].workers:
        world.kill(worker)

    assert is_promised(world, fair=False)  # by machine 1, and the supervisor of machine 2
    assert train_on(world) is asks_all


def deliver(world: World, which: Callable[[Message], bool]) -> None:
    """Deliver all messages of a kind, and those that follow."""
    while found := [index for index, message in enumerate(world.flight) if which(message)]:
        world.deliver(found[0])
