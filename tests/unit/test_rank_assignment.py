"""Which rank each process of a launcher gets."""

from __future__ import annotations

import pytest

from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.rendezvous.registration import RegisteredWorld, Registration
from paceline.errors import ConfigError


def registration(rank: int, host: str, local_rank: int, node: int | None = None) -> Registration:
    return Registration(
        id=f"id{rank}",
        rank=rank,
        node=node,
        local_rank=local_rank,
        process=ProcessIdentity(host=host, kernel=host, network=host, pid=rank, started=0),
        addresses=("127.0.0.1",),
        port=1,
    )


def ranks(*registrations: Registration) -> list[list[int]]:
    """Return the launcher's ranks on each machine, in our order."""
    world = RegisteredWorld(token="t", registrations=registrations)
    return [[each.rank for each in group] for group in world.processes_by_machine()]


def test_block_by_block_our_ranks_are_the_launchers() -> None:
    a, b = ("a", 0), ("b", 1)
    places = [(a, 0), (a, 1), (b, 0)]
    assert ranks(*(registration(i, h, r, n) for i, ((h, n), r) in enumerate(places))) == [
        [0, 1],
        [2],
    ]


def test_ranks_that_go_round_the_machines_are_counted_anew() -> None:
    places = [("a", 0, 0), ("b", 0, 1), ("a", 1, 0), ("b", 1, 1)]
    found = ranks(*(registration(i, h, r, n) for i, (h, r, n) in enumerate(places)))
    assert found == [[0, 2], [1, 3]]


def test_machines_are_in_the_launchers_order() -> None:
    assert ranks(registration(0, "b", 0, 1), registration(1, "a", 0, 0)) == [[1], [0]]


def test_without_the_launchers_numbers_machines_are_known_by_their_network() -> None:
    places = [("b", 0), ("a", 0), ("b", 1), ("a", 1)]
    found = ranks(*(registration(i, host, local) for i, (host, local) in enumerate(places)))
    assert found == [[0, 2], [1, 3]]


def test_a_machine_named_twice_is_two() -> None:
    places = [("a", 0), ("a", 1), ("a", 0)]
    found = ranks(*(registration(i, host, local) for i, (host, local) in enumerate(places)))
    assert found == [[0, 1], [2]]


@pytest.mark.parametrize("local_ranks", [(0, 0), (0, 2), (1, 2)])
def test_local_ranks_with_holes_are_refused(local_ranks: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="give the processes on a the local ranks"):
        ranks(*(registration(i, "a", local, 0) for i, local in enumerate(local_ranks)))


def test_a_world_survives_the_store() -> None:
    world = RegisteredWorld(
        token="t", registrations=(registration(0, "a", 0), registration(1, "b", 0, 1)), lost="why"
    )
    assert RegisteredWorld.from_text(world.to_text()) == world
