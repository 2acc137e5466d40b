"""Choice of a model's cuts, by measured time and by memory.

Forward and backward of one microbatch are timed for each block, on a copy of it: the median of a
few. The slowest stage sets the pipeline's pace, so the cuts are chosen whose slowest stage is
fastest; among equal ones, those whose largest stage has the fewest bytes of parameters. Without an
example batch, bytes alone decide.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.parallel.blocks import Glue, run_blocks
from paceline.parallel.materialize import real_copy

_ROUNDS = 3


class Cost(NamedTuple):
    """Cost of a block, or of a stage.

    Attributes:
        seconds: of forward and backward of a microbatch; 0 where none was measured.
        bytes: of its parameters.
    """

    seconds: float
    bytes: int


def block_costs(
    model: nn.Module, paths: Sequence[str], glue: Glue, example: Tensor | None
) -> list[Cost]:
    """Return the cost of each block; the model stays as it is.

    Args:
        model: the model.
        paths: of its blocks.
        glue: what is between its children.
        example: a microbatch; None: nothing is timed.
    """
    costs = []
    value: Any = example
    for path in paths:
        block = model.get_submodule(path)
        seconds = 0.0
        if example is not None:
            with torch.random.fork_rng(devices=[]):
                seconds, value = _timed(real_copy(block), path, glue, value)
        costs.append(Cost(seconds, sum(p.nbytes for p in block.parameters())))
    return costs


def best_cuts(costs: Sequence[Cost], stages: int) -> tuple[int, ...]:
    """Return the index of the first block of each stage but the first, of at least 2 stages."""

    @lru_cache(None)
    def best(first: int, left: int) -> tuple[Cost, tuple[int, ...]]:
        """Return the largest cost of the stages from a block on, and where they begin."""
        if left == 1:
            return stage_costs(costs[first:], ())[0], (first,)
        found = []
        for end in range(first + 1, len(costs) - left + 2):
            own = stage_costs(costs[first:end], ())[0]
            rest, cuts = best(end, left - 1)
            slower = Cost(max(own.seconds, rest.seconds), max(own.bytes, rest.bytes))
            found.append((slower, (first, *cuts)))
        return min(found)

    return best(0, stages)[1][1:]


def stage_costs(costs: Sequence[Cost], cuts: Sequence[int]) -> list[Cost]:
    """Return the cost of each stage."""
    bounds = zip((0, *cuts), (*cuts, len(costs)), strict=True)
    return [
        Cost(sum(c.seconds for c in costs[a:b]), sum(c.bytes for c in costs[a:b]))
        for a, b in bounds
    ]


def _timed(block: nn.Module, path: str, glue: Glue, value: Any) -> tuple[float, Any]:
    """Return the seconds of a block's forward and backward, and what it returns."""
    seconds = []
    output: Any = None
    for _ in range(_ROUNDS):
        leaves = tree_map(_leaf, value)
        begin = time.perf_counter()
        output = run_blocks({path: block}, glue, leaves)
        ends = [output] if isinstance(output, Tensor) else output
        ends = [end for end in ends if end.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        seconds.append(time.perf_counter() - begin)
    return median(seconds), tree_map(Tensor.detach, output)


def _leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_(value.is_floating_point())
