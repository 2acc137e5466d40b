"""The vote on the next generation over random schedules, and mutants that such schedules find.

`python -m tests.harness.membership.check` runs as many schedules as one likes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.harness.membership.check import found_by
from tests.harness.membership.endings import is_promised, train_on
from tests.harness.membership.mutants import MUTANTS
from tests.harness.membership.processes import Faults
from tests.harness.membership.schedules import run_schedule
from tests.harness.membership.world import World

SCHEDULES, PARTS = 10_000, 5
OFTEN = {
    "lost messages": 1000,
    "reordered messages": 10_000,
    "duplicated messages": 100,
    "pauses": 300,
    "partitions": 300,
    "killed workers": 500,
    "killed supervisors": 200,
    "killed machines": 200,
    "false suspicions": 500,
    "lost witnesses": 100,
    "committed snapshots": 5000,
    "durable starts": 3,
    "joiners": 30,
    "planned changes": 100,
    "generations": 500,
    "chains of three generations": 10,
    "schedules that must go on": 500,
}
"""How often each thing happens, at least, in a fifth of the schedules."""

FIRST = {
    "a quorum of N/2": 250,
    "a write-once witness asked at the end": 630,
    "answering before recording": 27_475,
    "a witness whose nonce is ignored": 210,
    "a witness that takes lower generations": 8_050,
    "a restarted supervisor that reports an empty record": 2_360,
    "snapshots named by step alone": 1_085,
    "not dropping what lies beyond a start": 345,
    "dropping a snapshot that the record lists": 24_510,
    "a durable start whose step isn't decided": 60,
    "a witness that is silent on lower generations": 17_705,
}
"""The seeds a little before those that find a mutant; `docs/membership.md` counts from seed 0."""


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


def trained(shape: tuple[int, ...], seed: int, *, witness: bool) -> World:
    """Return a run in mid-training."""
    rng = random.Random(seed)
    interval = rng.choice((1, 2))
    world = World(rng, shape, faults=Faults(), interval=interval, witness=witness, parts=True)
    for _ in range(rng.randrange(4, 30)):
        for worker in world.workers:
            world.training.exchange(worker, 0.7)
            world.training.step(worker)
    return world


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
        assert is_promised(world, fair=True)
        assert train_on(world), f"schedule {seed}"
        world.oracle.check_ledger()


def test_a_pair_that_loses_the_casting_machine_has_no_successor() -> None:
    for seed in range(100):
        world = trained((1, 1), seed, witness=False)
        lose_machine_0(world)
        assert not is_promised(world, fair=True)
        assert not train_on(world)
        assert not world.oracle.successors
