"""Registrations of memory last as long as a user, or somebody who touches it, needs them."""

import torch

from paceline.comm.nixl.memory_registration import RegisteredMemory

MEMORY = torch.zeros(200, dtype=torch.uint8)


class Card:
    """A network card that counts."""

    def __init__(self) -> None:
        self.open: list[tuple[int, int]] = []

    def register_memory(
        self, ranges: list[tuple[int, int, int, str]], kind: str
    ) -> tuple[int, int]:
        ((address, size, _, _),) = ranges
        self.open.append((address - MEMORY.data_ptr(), size))
        return self.open[-1]

    def deregister_memory(self, registration: tuple[int, int]) -> None:
        self.open.remove(registration)


def part(first: int, size: int) -> torch.Tensor:
    return MEMORY[first : first + size]


def test_two_users_of_a_stretch_share_its_registration() -> None:
    card = Card()
    registered = RegisteredMemory(card)
    registered.take(part(100, 50))
    registered.take(part(100, 50))
    assert card.open == [(100, 50)]
    registered.give_back(part(100, 50))
    assert card.open == [(100, 50)]
    registered.give_back(part(100, 50))
    assert card.open == []


def test_a_registration_outlives_those_in_use_that_it_touches() -> None:
    card = Card()
    registered = RegisteredMemory(card)
    registered.take(part(100, 50))
    registered.take(part(140, 50))
    registered.take(part(190, 10))  # beside the second, not in it
    registered.give_back(part(100, 50))
    registered.give_back(part(190, 10))
    assert card.open == [(100, 50), (140, 50)]
    registered.give_back(part(140, 50))
    assert card.open == []


def test_all_end_with_it() -> None:
    card = Card()
    registered = RegisteredMemory(card)
    registered.take(part(0, 1))
    registered.take(part(5, 1))
    registered.close()
    assert card.open == []
