"""Cost of a run over all ranks and starts, in its position.

Each start of a machine has an entry of its own, what it has used since then, and so has each GPU.
All ranks exchange theirs at the end of an epoch and at a stop, before a checkpoint is saved. So a
run that resumes knows what it cost before, and one that goes back to a snapshot counts nothing
twice:

    position.usage    "3f2a9c1d04be/0": machine 0 in the first start
                      "3f2a9c1d04be-1/gpu": the GPU of its member 1
                      "77c0f2e9ab41/0": machine 0 in the start that resumed
"""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, replace

import torch

from paceline.comm.communicator import total
from paceline.generation.run import Run
from paceline.observe.cost.cost import Cost
from paceline.observe.cost.cost_meter import CostMeter, Usage, total_usage
from paceline.run.extension import Extension
from paceline.snapshots.position import Position


class RunCost(Extension):
    """Cost of a run over all ranks and starts.

    Args:
        run: the run, whose recorder gets the event `cost`.
        position: the run's, which has the usage of all starts.
        meter: of this worker.
        price_per_hour: of a machine; 0: it isn't known.
    """

    def __init__(
        self, run: Run, position: Position, meter: CostMeter, price_per_hour: float
    ) -> None:
        self._run = run
        self._position = position
        self._meter = meter
        self._price_per_hour = price_per_hour

    def end_epoch(self) -> None:
        """Add up what all ranks used, and record it; collective.

        Raises:
            CommError: a peer was lost, or silent.
        """
        context = self._run.context
        group = context.world
        members = group.generation.members
        machines = [member.machine for member in members]
        own = self._meter.usage(first=machines.index(group.machine) == group.rank)
        used = torch.zeros(len(members), len(astuple(own)), dtype=torch.float64)
        used[group.rank] = torch.tensor(astuple(own))
        rows = total(context.group("all", "steps"), used, "the sum of costs").tolist()
        known = dict(self._position.usage)
        for member, row in zip(members, rows, strict=True):
            one = Usage.of_values(row)
            start = member.id.rpartition("-")[0]
            place = f"{start}/{member.machine}" if self._meter.supervised else member.id
            if one.processor:
                known[place] = _values(replace(one, gpu=0.0, gpu_energy=0.0))
            if one.gpu:
                of_gpu = Usage(gpu=one.gpu, gpu_energy=one.gpu_energy)
                known[f"{member.id}/gpu"] = _values(of_gpu)
        self._position.usage = known
        usage = total_usage(_usage(values) for values in known.values())
        cost = Cost.of_usage(usage, self._price_per_hour)
        number = group.generation.number
        self._run.recorder.event("cost", generation=number, **asdict(cost))


def _values(usage: Usage) -> list[float | None]:
    """Return the values of an entry; None for what isn't known, as NaN isn't equal to itself."""
    return [None if math.isnan(value) else value for value in astuple(usage)]


def _usage(values: list[float | None]) -> Usage:
    return Usage.of_values(math.nan if value is None else value for value in values)
