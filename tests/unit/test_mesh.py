"""A mesh knows which ranks are along each axis, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cluster.membership.backup_holder import holder_of
from paceline.errors import ConfigError
from paceline.generation.mesh import Mesh
from tests.harness.processes.worlds import world_of

REST = ((4, 6), (5, 7))
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


@pytest.mark.parametrize(
    ("machines", "stage", "tensor", "lines"),
    [
        ((1, 1), 2, 1, {"stage": ((0, 1),), "data": ((0,), (1,)), "tensor": ((0,), (1,))}),
        ((2, 2), 2, 1, {"stage": ((0, 2), (1, 3)), "data": ((0, 1), (2, 3))}),
        (
            (4, 4),
            2,
            2,
            {"stage": ((0, 4), (1, 5), (2, 6), (3, 7)), "data": ((0, 2), (1, 3), *REST)},
        ),
        ((4, 4), 4, 1, {"stage": ((0, 2, 4, 6), (1, 3, 5, 7))}),
        ((2,), 1, 1, {"stage": ((0,), (1,)), "data": ((0, 1),)}),
    ],
)
def test_stages_lie_on_machines_of_their_own_and_tensor_ranks_in_one(
    machines: tuple[int, ...], stage: int, tensor: int, lines: dict[str, object]
) -> None:
    mesh = Mesh.of(replace(world_of(machines).generation, stages=stage, tensor=tensor))
    assert {axis: mesh.lines(axis) for axis in lines} == lines
    assert mesh.divided == (stage * tensor > 1)


def test_a_line_is_cut_by_machine_and_counted_along_itself() -> None:
    mesh = Mesh.of(replace(world_of((3, 3)).generation, stages=2))
    assert mesh.machines_along("data", 4) == ((0, 1, 2),)
    assert mesh.machines_along("stage", 4) == ((0,), (1,))
    uneven = Mesh.of(replace(world_of((1, 3)).generation, stages=2))
    assert uneven.line("data", 1) == (0, 1)
    assert uneven.machines_along("data", 1) == ((0,), (1,))


@pytest.mark.parametrize("gone", [(0, 3), (1, 4), (2, 5)])
def test_ranks_without_a_whole_replica_keep_their_stages(gone: tuple[int, int]) -> None:
    before = Mesh.of(replace(world_of((3, 3)).generation, stages=2))
    generation = replace(world_of((3, 3)).generation, stages=2)
    assert gone in before.lines("stage")
    assert [generation.replica_of(rank) for rank in gone] == [gone, gone]
    left = [each for rank, each in enumerate(generation.members) if rank != gone[1]]
    whole = [each for rank, each in enumerate(generation.members) if rank not in gone]
    assert generation.in_whole_replicas(left) == whole
    kept = [rank for rank in range(6) if rank not in gone]
    after = Mesh(machines=tuple(before.machines[r] for r in kept), axes=(("stage", 2), ("data", 2)))
    for stage in (0, 1):
        assert [kept[rank] for rank in after.lines("data")[stage]] == [
            rank for rank in before.lines("data")[stage] if rank in kept
        ]


def test_processes_that_are_no_whole_replicas_are_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        Mesh.of(replace(world_of((2, 1)).generation, stages=2))
    assert str(raised.value) == (
        "--mesh 2 stages of 1 tensor rank: a replica takes 2 processes, which don't divide the 3 "
        "of this world; start 4 processes, or change the lengths."
    )


def test_tensor_ranks_on_two_machines_are_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        Mesh.of(replace(world_of((3, 3)).generation, tensor=2))
    assert str(raised.value) == (
        "--mesh 1 stage of 2 tensor ranks: tensor ranks exchange in each layer and must share a "
        "machine, but rank 2 on machine 0 (a) and rank 3 on machine 1 (b) would share a stage; "
        "start a multiple of 2 processes on each machine, or divide replicas into stages."
    )


def test_ranks_of_one_line_have_the_same_part_and_hold_backups_for_each_other() -> None:
    generation = replace(world_of((4, 4)).generation, stages=2, tensor=2)
    mesh = Mesh.of(generation)
    for rank in range(8):
        assert generation.holders_of_part(rank) == mesh.line("data", rank)
        holder = holder_of(generation, rank)
        assert holder in mesh.line("data", rank)
        assert holder != rank
    assert holder_of(replace(generation, stages=4), 0) is None


def test_holders_are_on_another_machine_where_the_part_is_there_too() -> None:
    generation = replace(world_of((1, 3)).generation, stages=2)
    assert [holder_of(generation, rank) for rank in range(4)] == [1, 0, 3, 2]
