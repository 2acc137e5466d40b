"""Mesh: the ranks of a generation along axes, of which "data" divides the samples.

Every mesh has two more axes: "all" has all ranks in their order, "machine" those of one machine.

    rank         0    1    2    3        machines (0, 0, 1, 1), axes (("data", 4),)
    all          ──────────────────      summaries and stops
    data         ──────────────────      samples, seeds, weights, replicas, shares
    machine      ───────  ─────────
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Self

from paceline.cluster.membership.generation import Generation


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Mesh: all ranks of a generation, as a grid.

    Attributes:
        machines: for each rank, the number of its machine.
        axes: name and length of each axis; ranks next to each other differ in the last one. The
            product of the lengths is the number of ranks.
    """

    machines: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        assert prod(length for _, length in self.axes) == len(self.machines)

    @classmethod
    def of_data(cls, generation: Generation) -> Self:
        """Return the mesh of a generation in which each rank has a replica of the whole model."""
        machines = tuple(member.machine for member in generation.members)
        return cls(machines=machines, axes=(("data", len(machines)),))

    def lines(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return the ranks along an axis, in their order, for each place on the other axes."""
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank in range(len(self.machines)):
            lines.setdefault(self._elsewhere(axis, rank), []).append(rank)
        return tuple(map(tuple, lines.values()))

    def _elsewhere(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return a rank's place on the axes other than this one."""
        if axis == "all":
            return ()
        if axis == "machine":
            return (self.machines[rank],)
        names = [name for name, _ in self.axes]
        index = names.index(axis)
        inner = prod(length for _, length in self.axes[index + 1 :])
        return (rank // (inner * self.axes[index][1]), rank % inner)
