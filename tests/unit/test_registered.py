"""Registrations of memory last as long as a user, or somebody who touches it, needs them."""

from paceline.comm.nixl.memory_registration import RegisteredMemory


class Card:
    """A network card that counts."""

    def __init__(self) -> None:
        self.open: list[tuple[int, int]] = []

    def register(self, address: int, size: int) -> tuple[int, int]:
        self.open.append((address, size))
        return address, size

    def deregister(self, registration: tuple[int, int]) -> None:
        self.open.remove(registration)


def test_two_users_of_a_stretch_share_its_registration() -> None:
    card = Card()
    registered = RegisteredMemory(card.register, card.deregister)
    registered.take(100, 50)
    registered.take(100, 50)
    assert card.open == [(100, 50)]
    registered.give_back(100, 50)
    assert card.open == [(100, 50)]
    registered.give_back(100, 50)
    assert card.open == []


def test_a_registration_outlives_those_in_use_that_it_touches() -> None:
    card = Card()
    registered = RegisteredMemory(card.register, card.deregister)
    registered.take(100, 50)
    registered.take(140, 50)
    registered.take(190, 10)  # beside the second, not in it
    registered.give_back(100, 50)
    registered.give_back(190, 10)
    assert card.open == [(100, 50), (140, 50)]
    registered.give_back(140, 50)
    assert card.open == []


def test_all_end_with_it() -> None:
    card = Card()
    registered = RegisteredMemory(card.register, card.deregister)
    registered.take(0, 1)
    registered.take(5, 1)
    registered.close()
    assert card.open == []
