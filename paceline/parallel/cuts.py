"""Choice of a model's cuts, by measured time and by memory.

Forward and backward of one microbatch are timed for each block, on a copy of it: the median of a
few. The slowest stage sets the pipeline's pace, so the cuts are chosen whose slowest stage is
fastest; among equal ones, those whose largest stage has the fewest bytes of parameters. Without an
example batch, bytes alone decide. No stage is without parameters, or ends at a block that has
returned what doesn't travel, where there are such cuts.

A run resumes with the cuts that it began with, so the choice is in `cuts.toml` in its folder:

    cuts = ["layer3"]
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import tomli_w
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.atomic_write import explained_writes, write_atomically
from paceline.comm.communicator import broadcast_state
from paceline.errors import ConfigError
from paceline.generation.run import Run
from paceline.models.output_check import explained_errors
from paceline.parallel.blocks import Glue, can_travel, cut_paths, run_blocks
from paceline.parallel.materialize import real_copy

NAME = "cuts.toml"
_ROUNDS = 3


class Cost(NamedTuple):
    """Cost of a block, or of a stage.

    Attributes:
        seconds: of forward and backward of a microbatch; 0 where none was measured.
        bytes: of its parameters.
        travels: whether what it returns can be sent to another stage.
    """

    seconds: float
    bytes: int
    travels: bool = True


@dataclass(frozen=True)
class CutChoice:
    """Choice of a model's cuts, on rank 0 for all ranks.

    Attributes:
        model: the model, which stays as it is.
        paths: of its blocks.
        glue: what is between its children.
        example: a microbatch; None: nothing is timed.
        spelled: writes cuts as the user gives them.
    """

    model: nn.Module
    paths: Sequence[str]
    glue: Glue
    example: Tensor | None
    spelled: Callable[[Sequence[str]], str] = "cuts={}".format

    def make(self, run: Run, folder: Path | None, report: Callable[[str], None]) -> Sequence[str]:
        """Return the cuts, those of the run's first start where there are some; collective.

        Args:
            run: whose ranks along the axis "stage" are the stages.
            folder: the run's, which gets the choice; None: it isn't written down.
            report: gets the choice as a sentence, with its figures.
        """
        stages = run.context.along("stage").size
        chosen: Sequence[int] = ()
        if run.leads:
            earlier = None if folder is None else self._read(folder / NAME, stages)
            chosen = earlier or self._measured(stages, report)
            if earlier:
                names = self.spelled([self.paths[index] for index in earlier])
                report(f"{names}, as at the first start of this run ({NAME} in its folder).")
        communicator = run.context.group("all", "steps")
        chosen = broadcast_state(communicator, torch.tensor(chosen), "the choice of cuts").tolist()
        cuts = [self.paths[index] for index in chosen]
        # On each machine: another one may have the first rank when the run resumes.
        if folder is not None and run.context.along("machine").rank == 0:
            with explained_writes(folder / NAME):
                write_atomically(folder / NAME, tomli_w.dumps({"cuts": cuts}))
        return cuts

    def _measured(self, stages: int, report: Callable[[str], None]) -> Sequence[int]:
        with nullcontext() if self.example is None else explained_errors(self.example):
            costs = block_costs(self.model, self.paths, self.glue, self.example)
        chosen = best_cuts(costs, stages)
        names = [self.paths[index] for index in chosen]
        texts = [
            f"stage {n} {cost.bytes / 2**20:.1f} MiB"
            + (f" and {cost.seconds * 1e3:.1f} ms a microbatch" if cost.seconds else "")
            for n, cost in enumerate(stage_costs(costs, chosen))
        ]
        by = "parameters' bytes" if self.example is None else "measured time"
        report(f"cuts by {by}: {', '.join(texts)}. Pin this choice with {self.spelled(names)}.")
        return chosen

    def _read(self, path: Path, stages: int) -> Sequence[int] | None:
        """Return the index of each earlier cut; None: there are none that fit."""
        try:
            parts = cut_paths(self.paths, tomllib.loads(path.read_text())["cuts"])
        except (OSError, ValueError, TypeError, KeyError, ConfigError):
            return None
        return [self.paths.index(part[0]) for part in parts[1:]] if len(parts) == stages else None


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
        size = sum(p.nbytes for p in block.parameters())
        costs.append(Cost(seconds, size, example is None or can_travel(value)))
    return costs


def best_cuts(costs: Sequence[Cost], stages: int) -> tuple[int, ...]:
    """Return the index of the first block of each stage but the first, of at least 2 stages."""

    @lru_cache(None)
    def best(first: int, left: int) -> tuple[Cost, tuple[int, ...]]:
        """Return the largest cost of the stages from a block on, and where they begin."""
        if left == 1:
            return _rated(costs[first:]), (first,)
        found = []
        for end in range(first + 1, len(costs) - left + 2):
            own = _rated(costs[first:end])
            own = own if costs[end - 1].travels else Cost(inf, own.bytes)
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


def _rated(costs: Sequence[Cost]) -> Cost:
    """Return the cost of a stage; one without parameters is the last choice."""
    cost = stage_costs(costs, ())[0]
    return cost if cost.bytes else Cost(inf, 0)


def _timed(block: nn.Module, path: str, glue: Glue, value: Any) -> tuple[float, Any]:
    """Return the seconds of a block's forward and backward, and what it returns."""
    seconds = []
    output: Any = None
    for _ in range(_ROUNDS):
        leaves = tree_map_only(Tensor, _leaf, value)
        begin = time.perf_counter()
        output = run_blocks({path: block}, glue, leaves)
        ends = [end for end in tree_leaves(output) if getattr(end, "requires_grad", False)]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        seconds.append(time.perf_counter() - begin)
    return median(seconds), tree_map_only(Tensor, Tensor.detach, output)


def _leaf(value: Tensor) -> Tensor:
    # The copy of a leaf: a block in place may write to it, not to a leaf.
    return value.detach().requires_grad_(value.is_floating_point()).clone()
