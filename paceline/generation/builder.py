"""Builder: the mesh of each generation, and the communicator groups that it opens."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cluster.membership.generation import Generation
from paceline.generation.mesh import Mesh


class Builder:
    """Builder of a run's generations.

    Args:
        stage: the number of stages into which a replica of the model is divided.
        tensor: the number of ranks among which each stage is divided.
    """

    def __init__(self, *, stage: int = 1, tensor: int = 1) -> None:
        self._stage = stage
        self._tensor = tensor
        self._purposes: list[tuple[str, str]] = []

    def mesh(self, generation: Generation) -> Mesh:
        """Return a generation's ranks along their axes."""
        return Mesh.of(generation, stage=self._stage, tensor=self._tensor)

    def purposes(self) -> Sequence[tuple[str, str]]:
        """Return (axis, purpose) of the groups that each generation opens, in this order."""
        return self._purposes

    def add(self, axis: str, purpose: str) -> None:
        """Let later generations open a group, too; all ranks call it in the same order."""
        if (axis, purpose) not in self._purposes:
            self._purposes.append((axis, purpose))
