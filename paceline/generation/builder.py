"""Builder: the mesh of each generation, and the communicator groups that it opens."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cluster.membership.generation import Generation
from paceline.generation.mesh import Mesh


class Builder:
    """Builder of a run's generations."""

    def __init__(self) -> None:
        self._purposes: list[tuple[str, str]] = []

    def mesh(self, generation: Generation) -> Mesh:
        """Return a generation's ranks along their axes."""
        return Mesh.of(generation)

    def purposes(self) -> Sequence[tuple[str, str]]:
        """Return (axis, purpose) of the groups that each generation opens, in this order."""
        return self._purposes

    def add(self, axis: str, purpose: str) -> None:
        """Let later generations open a group, too; all ranks call it in the same order."""
        if (axis, purpose) not in self._purposes:
            self._purposes.append((axis, purpose))
