"""Mesh: the ranks of a generation along axes, of which "data" divides the samples.

A replica of the model is divided among stages, and each stage among tensor ranks. Every mesh has
two more axes: "all" has all ranks in their order, "machine" those of one machine.

    rank         0    1    2    3        machines (0, 0, 1, 1), 2 stages
    all          ──────────────────      summaries and stops
    stage        0    0    1    1        lines (0, 2) and (1, 3): one replica each
    data         0    1    0    1        lines (0, 1) and (2, 3): samples, seeds, weights, shares
    tensor       0    0    0    0
    machine      ───────  ─────────

Placement: ranks are numbered machine by machine, and the axes are stage, data, tensor, of which the
last changes first. So tensor ranks, which exchange in each layer, are next to each other in one
machine; stages, which exchange activations alone, are as far apart as can be: on machines of their
own where there are as many. The replicas of a stage are next to each other, and share a machine's
memory where it has several. The ranks that remain without a whole replica keep these places.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Self

from paceline.cluster.membership.generation import Generation
from paceline.errors import ConfigError, many


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

    @classmethod
    def of(cls, generation: Generation) -> Self:
        """Return the mesh of a generation.

        Raises:
            ConfigError: the ranks aren't whole replicas, or tensor ranks are on several machines.
        """
        machines = tuple(member.machine for member in generation.members)
        size = len(machines)
        stage = generation.stages
        tensor = generation.tensor
        replica = stage * tensor
        given = f"{many(stage, 'stage')} of {many(tensor, 'tensor rank')}"
        if size % replica:
            raise ConfigError(
                flag="mesh",
                value=given,
                rule=f"a replica takes {many(replica, 'process')}, which don't divide the "
                f"{size:,} of this world",
                remedy=f"start {-(-size // replica) * replica:,} processes, or change the lengths",
            )
        mesh = cls(
            machines=machines,
            axes=(("stage", stage), ("data", size // replica), ("tensor", tensor)),
        )
        for line in mesh.lines("tensor"):
            first, last = (generation.describe(rank) for rank in (line[0], line[-1]))
            if machines[line[0]] != machines[line[-1]]:
                raise ConfigError(
                    flag="mesh",
                    value=given,
                    rule="tensor ranks exchange in each layer and must share a machine, but "
                    f"{first} and {last} would share a stage",
                    remedy=f"start a multiple of {tensor} processes on each machine, or divide "
                    "replicas into stages",
                )
        return mesh

    @property
    def lengths(self) -> dict[str, int]:
        """The length of each axis, by its name."""
        return dict(self.axes)

    @property
    def divided(self) -> bool:
        """Whether a replica takes several ranks."""
        return self.lengths["data"] < len(self.machines)

    def line(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks along an axis, in their order, at a rank's place on the others."""
        return next(line for line in self.lines(axis) if rank in line)

    def machines_along(self, axis: str, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return a rank's line along an axis, by machine; its ranks are counted along the line."""
        groups: dict[int, list[int]] = {}
        for index, each in enumerate(self.line(axis, rank)):
            groups.setdefault(self.machines[each], []).append(index)
        return tuple(map(tuple, groups.values()))

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
