"""A step by `weight=` equals one process, whatever the losses are means over."""

from __future__ import annotations

import pytest

from tests.harness.equivalence.large_batch import largest_difference
from tests.harness.library.weighted_loops import cases, expected, run_weighted
from tests.harness.network.ports import free_ports
from tests.harness.processes.gloo_processes import spawn

LIMIT = 1e-10


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_by_weight_equals_one_process(world_size: int) -> None:
    named = cases(world_size)
    states = spawn(world_size, run_weighted, free_ports(len(named)))
    for number, (loop, kind, method) in enumerate(named):
        whole = expected(world_size, loop, kind)
        for of_rank in states:
            difference = largest_difference(of_rank[number], whole)
            assert difference < LIMIT, (loop, kind, method)
