"""The comparison of the ranks' last states, by the store alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from paceline.errors import CommError, ReplicasDiffer
from paceline.replica.checksums import Checksums, code_of
from paceline.run import last_comparison
from paceline.run.last_comparison import LastState, post_and_compare
from tests.harness.processes.worlds import world_of

SAME = {"0.weight": 1, "0.bias": 2}
OTHER = {"0.weight": 1, "0.bias": 3}
FACTS = "the replicas differ after 4 steps: rank 1 differs from the others in 0.bias. "
SILENT = "the ranks' last states were not compared: the store did not answer in 0.05 s."


class Closing:
    """Ranks that close their worlds in turn, and what they print."""

    def __init__(self, store: Store, ranks: int = 3) -> None:
        self.store, self.ranks, self.printed = store, ranks, list[str]()

    def close(self, rank: int, checksums: Checksums, **facts: Any) -> ReplicasDiffer | None:
        own = LastState(**{"steps": 4, "code": code_of(checksums), "used": False, **facts})
        group = world_of((self.ranks,), rank)
        return post_and_compare(self.store, group, own, checksums, self.printed.append)

    def all_close(
        self, states: Sequence[Checksums], used: int | None = None, steps: Sequence[int] = (4, 4, 4)
    ) -> ReplicasDiffer | None:
        *earlier, last = (
            self.close(rank, state, used=rank == used, steps=steps[rank])
            for rank, state in enumerate(states)
        )
        assert earlier == [None] * len(earlier)
        return last


class Reading(HashStore):
    """A store that lists the keys that are read, or doesn't answer when some are."""

    def __init__(self, silent: str = "") -> None:
        super().__init__()
        self.silent, self.reads = silent, list[str]()
        self.answer = threading.Event()

    def get(self, key: str) -> bytes:
        self.reads.append(key.split("/")[-2])
        if self.silent and self.silent in key:
            self.answer.wait()
        return super().get(key)


@pytest.fixture
def silent_store(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    monkeypatch.setattr(last_comparison, "_STORE_TIMEOUT_S", 0.05)
    store = Reading(request.param)
    yield store
    store.answer.set()


def test_the_last_rank_returns_the_error_of_states_that_no_script_has_used() -> None:
    closing = Closing(Reading())
    error = closing.all_close([SAME, OTHER, SAME])
    assert str(error).startswith(FACTS)
    assert not closing.printed


@pytest.mark.parametrize("used", [0, 1, 2])
def test_it_is_a_warning_where_any_ranks_script_may_have_used_its_state(used: int) -> None:
    closing = Closing(Reading())
    assert closing.all_close([SAME, OTHER, SAME], used) is None
    (line,) = closing.printed
    assert line.startswith(f"warning: {FACTS}")
    assert line.endswith("through p.data, say.")


def test_equal_states_are_compared_by_their_codes_alone() -> None:
    store = Reading()
    closing = Closing(store)
    assert closing.all_close([SAME, SAME, SAME]) is None
    assert store.reads == ["state"] * 3
    assert not closing.printed


@pytest.mark.parametrize("steps", [(4, 3, 4), (4, 4, 3)])
def test_states_after_other_numbers_of_steps_are_not_compared(steps: Sequence[int]) -> None:
    closing = Closing(Reading())
    assert closing.all_close([SAME, OTHER, SAME], steps=steps) is None
    assert not closing.printed


@pytest.mark.parametrize("silent_store", ["state"], indirect=True)
def test_a_store_that_does_not_answer_is_a_note(silent_store: Store) -> None:
    closing = Closing(silent_store)
    assert closing.all_close([SAME, OTHER, SAME]) is None
    assert closing.printed == [SILENT]


@pytest.mark.parametrize("silent_store", ["checksums"], indirect=True)
def test_codes_that_differ_are_an_error_without_the_checksums(silent_store: Store) -> None:
    closing = Closing(silent_store)
    error = closing.all_close([SAME, OTHER, SAME])
    assert "rank 1 differs from the others in the parameters. " in str(error)
    assert not closing.printed


def test_a_store_that_is_lost_is_no_note() -> None:
    class Lost(HashStore):
        def set(self, key: str, value: str) -> None:
            raise CommError("the store is lost")

    closing = Closing(Lost())
    assert closing.all_close([SAME, OTHER, SAME]) is None
    assert not closing.printed
