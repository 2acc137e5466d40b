"""What a lost worker trained since the last merge is merged by the worker that has its part."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from paceline.algorithms.average_parts import UNMERGED, divide_state, restore_divided
from paceline.algorithms.synchronizer import Weights
from paceline.comm.communicator import Communicator
from paceline.errors import RankStateError
from paceline.state.state_copy import copy_state
from paceline.update.outer.average import Average
from tests.harness.equivalence.averaging import State, Task, Worker, cuts, on_ranks

STEPS, LOST = 5, 2  # fragments are taken after steps 1, 3, 5
Divided = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def task(workers: int) -> Task:
    average = Average(every=4, fragments=2, delay=0)
    return Task(average=average, cuts=cuts(8, workers, seed=1))


def divided() -> list[tuple[Divided, State]]:
    """Train three workers; return for each what a snapshot has, and the merged weights after it."""

    def work(worker: Worker, _: Communicator) -> tuple[Divided, State]:
        worker.train(range(STEPS))
        state: Divided = copy_state(divide_state(worker.replica.rounds))
        worker.replica.settle(Weights.MERGED)
        return state, worker.merged()

    return on_ranks(task(3), work)


def merged_by_two(of_three: list[tuple[Divided, State]], *, handed_over: bool) -> list[State]:
    """Restore on two workers, the second of which may get the lost worker's part; merge."""

    def work(worker: Worker, communicator: Communicator) -> State:
        (own, local, shared), _ = of_three[worker.rank]
        parts = [own, of_three[LOST][0][0]] if handed_over and worker.rank else [own]
        restore_divided(worker.replica.rounds, parts, local, shared, communicator)
        worker.replica.settle(Weights.MERGED)
        return worker.merged()

    return on_ranks(task(2), work)


def difference(one: State, other: State) -> float:
    """Return the largest difference of the parameters."""

    def largest(a: Tensor, b: Tensor) -> float:
        return float((a - b).abs().max())

    return max(largest(one[name], other[name]) for name in one if "running" not in name)


def test_two_workers_of_which_one_has_the_part_of_a_third_merge_as_three_do() -> None:
    of_three = divided()
    part = of_three[LOST][0][0]
    changed = part[UNMERGED].keys() & of_three[0][1].keys()
    assert changed, "all was merged, so nothing is taken over"
    before = of_three[0][0][2]["anchor"]
    after = of_three[0][1]
    assert max(float((after[n].flatten() - before[n]).abs().max()) for n in changed) > 1e-3
    for state in merged_by_two(of_three, handed_over=True):
        assert difference(state, after) < 1e-12


def test_unmerged_changes_of_which_no_rank_has_the_part_are_an_error() -> None:
    with pytest.raises(RankStateError, match="a lost worker, whose latest changes weren't merged"):
        merged_by_two(divided(), handed_over=False)


def test_workers_get_their_own_weights_back_where_all_was_merged() -> None:
    elastic = Task(average=Average(every=2, outer="easgd"), cuts=cuts(4, 2))

    def train(worker: Worker, _: Communicator) -> tuple[Divided, State]:
        worker.train(range(2))
        return copy_state(divide_state(worker.replica.rounds)), worker.own()

    def restore(worker: Worker, communicator: Communicator) -> State:
        (own, local, shared), _ = trained[worker.rank]
        restore_divided(worker.replica.rounds, [own], local, shared, communicator)
        return worker.own()

    trained = on_ranks(elastic, train)
    (one, first), (_, second) = trained
    assert not one[0][UNMERGED]
    assert difference(first, second) > 1e-3  # which elastic averaging leaves
    for restored, (_, own) in zip(on_ranks(elastic, restore), trained, strict=True):
        assert difference(restored, own) == 0
