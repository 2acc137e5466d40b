"""A mesh knows which ranks are along each axis, and nothing else."""

from __future__ import annotations

import pytest

from paceline.generation.mesh import Mesh
from tests.harness.processes.worlds import world_of

GRID = Mesh(machines=(0, 0, 0, 0, 1, 1, 1, 1), axes=(("stage", 2), ("data", 2), ("tensor", 2)))


@pytest.mark.parametrize(
    ("axis", "lines"),
    [
        ("all", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("machine", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("stage", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("data", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("tensor", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_each_rank_is_in_one_line_of_each_axis(
    axis: str, lines: tuple[tuple[int, ...], ...]
) -> None:
    assert GRID.lines(axis) == lines


def test_the_ranks_that_remain_are_counted_by_their_machines_numbers() -> None:
    mesh = Mesh.of_data(world_of((1, 3, 1)).generation)
    assert mesh.lines("data") == mesh.lines("all") == ((0, 1, 2, 3, 4),)
    assert mesh.lines("machine") == ((0,), (1, 2, 3), (4,))


def test_an_axis_that_a_mesh_has_not_is_a_bug() -> None:
    with pytest.raises(ValueError, match="tensor"):
        Mesh.of_data(world_of((2,)).generation).lines("tensor")
