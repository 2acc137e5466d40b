"""A peer that is lost in a script's loop: what the loop does where no update follows."""

from __future__ import annotations

import paceline
from paceline.api.rollback import Place
from tests.harness.equivalence.large_batch import largest_difference
from tests.harness.library.rollback_script import Breaks
from tests.harness.library.small_training import (
    BATCH,
    SEED,
    loss_of,
    network,
    samples,
    sgd,
    whole_batches,
)
from tests.harness.library.successors import Successors


def test_a_step_that_loses_a_peer_while_it_accumulates_is_made_again() -> None:
    model, alone = network(), network()
    with paceline.join(seed=SEED) as world:
        generations = Successors(world)
        breaks = Breaks(world, generations, [(1, "accumulating")])
        world._run.context.summaries.alone = False  # one rank alone takes no snapshots
        optimizer = paceline.parallelize(model, sgd(model), world)[1]
        done = []
        for x, y in paceline.loader(samples(), BATCH, world):
            with world.step() as step:
                with world.no_sync():
                    (loss_of(model, x, y) / 2).backward()
                    breaks.pass_by("accumulating")
                if world._loop.rollback.error is None:
                    (loss_of(model, x, y) / 2).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            done.append(step.done)
        steps = world.steps
        state = {name: value.clone() for name, value in model.state_dict().items()}
    assert done == [True, False, *[True] * steps]  # from the first step on again
    plain = sgd(alone)
    for x, y in whole_batches(samples(), 0):
        loss_of(alone, x, y).backward()
        plain.step()
        plain.zero_grad()
    assert largest_difference(state, alone.state_dict()) < 1e-10


def test_an_evaluation_that_is_repeated_has_the_place_that_it_had() -> None:
    with paceline.join(seed=SEED) as world:
        generations = Successors(world)
        breaks = Breaks(world, generations, [(1, "accumulating")])
        world._run.context.summaries.alone = False  # one rank alone takes no snapshots
        model = network()
        optimizer = paceline.parallelize(model, sgd(model), world)[1]
        rollback, places = world._loop.rollback, []
        for x, y in paceline.loader(samples(), BATCH, world):
            with world.step() as step:
                with world.no_sync():
                    breaks.pass_by("accumulating")
                if rollback.error is None:
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if step.done:
                places.append((world.steps, rollback.next_evaluation()))
                places.append((world.steps, rollback.next_evaluation()))
        steps = world.steps
    evaluated = [1, *range(1, steps + 1)]  # the first step is made again
    first, second = Place.EVALUATION, Place.EVALUATION + 2
    assert places == [(done, place) for done in evaluated for place in (first, second)]
