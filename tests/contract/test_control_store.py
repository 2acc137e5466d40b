"""The store over a control line: torch's operations, Gloo's groups, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from paceline.cluster.membership.control_line.line import ControlLine
from paceline.cluster.membership.control_store import ControlStore, ControlStores
from tests.harness.network.control_lines import Recorder, connect, line_of
from tests.harness.processes.gloo_all_reduce import sum_of_ranks
from tests.harness.processes.worlds import world_of

LIMIT = timedelta(seconds=30)
BINARY = bytes(range(256)) * 3


class Member(Recorder):
    """Member with a line, which hands its stores their frames."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.stores = ControlStores()
        self.line: ControlLine = line_of(name, self)

    def received(self, peer: str, kind: str, body: dict[str, Any], bulk: bytes | bytearray) -> None:
        self.stores.received(peer, body)
        super().received(peer, kind, body, bulk)

    def closed(self, peer: str, reason: str) -> None:
        self.stores.lost(peer)
        super().closed(peer, reason)

    def open(self, prefix: str = "generation/1", timeout: timedelta = LIMIT) -> ControlStore:
        """Open a store whose keys live in member a."""
        store = ControlStore(self.line, "a", self.line.name == "a", prefix, timeout)
        self.stores.add(store)
        return store


@pytest.fixture
def members() -> Iterator[list[Member]]:
    made = [Member(name) for name in "abc"]
    connect([member.line for member in made])
    yield made
    for member in made:
        member.line.close()


def failing(call: Callable[[], object], match: str) -> threading.Thread:
    """Make a call in a thread, which expects a store's error within a moment of its end."""

    def run() -> None:
        with pytest.raises(dist.DistStoreError, match=match):
            call()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def joined(threads: list[threading.Thread]) -> None:
    begin = time.monotonic()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert time.monotonic() - begin < 5


def wait_for_request(member: Member, operation: str, count: int) -> None:
    """Wait until a member has received so many requests."""
    member.wait(lambda m: sum(f[2].get("operation") == operation for f in m.frames) == count)


@pytest.mark.parametrize("user", [0, 1])
def test_its_operations_are_those_of_torchs_stores(members: list[Member], user: int) -> None:
    stores = [member.open() for member in members]
    store, other = stores[user], stores[2]
    for key, value in {"a": BINARY, "b/c": b"", "text": "é"}.items():
        store.set(key, value)
        assert other.get(key) == (value.encode() if isinstance(value, str) else value)
    assert store.num_keys() == 3
    assert store.check(["a", "text"])
    assert not store.check(["a", "d"])
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert (store.add("n", 7), other.add("n", -3), store.get("n")) == (7, 4, b"4")
    store.append("l", "one")
    other.append("l", b"two")
    store.multi_set(["x", "y"], [b"1", b"2"])
    assert other.multi_get(["l", "x", "y"]) == [b"onetwo", b"1", b"2"]
    assert store.clone().get("x") == b"1"


@pytest.mark.parametrize(
    ("before", "expected", "desired", "after"),
    [
        (None, "", "new", b"new"),
        (None, "old", "new", b"old"),  # torch's stores say so, and set nothing
        ("old", "old", "new", b"new"),
        ("old", "other", "new", b"old"),
        ("old", "", "new", b"old"),
    ],
)
def test_compare_set_sets_only_what_it_expected(
    members: list[Member], before: str | None, expected: str, desired: str, after: bytes
) -> None:
    _, store = members[0].open(), members[1].open()
    if before is not None:
        store.set("k", before)
    assert store.compare_set("k", expected, desired) == after
    assert store.check(["k"]) == ((before, expected) != (None, "old"))


@pytest.mark.parametrize(("waiter", "setter"), [(0, 1), (1, 0), (1, 2)])
def test_a_wait_ends_when_the_last_key_is_set(
    members: list[Member], waiter: int, setter: int
) -> None:
    stores = [member.open() for member in members]
    stores[setter].set("first", "1")
    with ThreadPoolExecutor() as pool:
        found = pool.submit(stores[waiter].multi_get, ["first", "last"])
        if waiter:
            wait_for_request(members[0], "wait", 1)
        stores[setter].set("last", "2")
        assert found.result(30) == [b"1", b"2"]


@pytest.mark.parametrize("user", [0, 1])
def test_waiting_ends_at_its_limit(members: list[Member], user: int) -> None:
    store = [member.open() for member in members][user]
    store.set("there", "1")
    begin = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="never"):
        store.wait(["there", "never"], timedelta(seconds=0.1))
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError, match="never"):
        store.get("never")
    assert 0.2 < time.monotonic() - begin < 5
    store.set("never", "1")
    assert store.get("never") == b"1"


def test_gloo_forms_a_group_of_threads(members: list[Member]) -> None:
    def form(rank: int) -> float:
        return sum_of_ranks(world_of((1, 1, 1), rank), members[rank].open())

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(form, range(3))) == [3.0, 3.0, 3.0]


def test_a_request_before_the_leader_has_opened_the_store_waits_for_it(
    members: list[Member],
) -> None:
    early = members[1].open()
    with ThreadPoolExecutor() as pool:
        done = pool.submit(early.add, "n", 3)
        wait_for_request(members[0], "add", 1)
        assert not done.done()
        assert members[0].open().add("n", 4) == 7
        assert done.result(30) == 3


def test_stores_of_two_generations_have_their_own_keys(members: list[Member]) -> None:
    for prefix in ("generation/1", "generation/2"):
        _, store = members[0].open(prefix), members[1].open(prefix)
        assert store.add("n", 1) == 1


def test_the_leaders_end_ends_waits_at_once(members: list[Member]) -> None:
    members[0].open()
    stores = [member.open() for member in members[1:]]
    threads = [failing(partial(store.get, "never"), "leader") for store in stores]
    wait_for_request(members[0], "wait", 2)
    members[0].line.close()
    joined(threads)
    with pytest.raises(dist.DistStoreError, match="leader"):
        members[1].open("generation/2").set("k", "1")


def test_a_close_ends_waits_at_once(members: list[Member]) -> None:
    stores = [member.open() for member in members[:2]]
    threads = [failing(partial(store.get, "never"), "closed the store") for store in stores]
    wait_for_request(members[0], "wait", 1)
    for member, store in zip(members, stores, strict=False):
        member.stores.remove(store)
    joined(threads)


def test_a_close_ends_the_forming_of_a_group(members: list[Member]) -> None:
    stores = [member.open() for member in members]
    threads = []
    for rank in (0, 1):  # rank 2 never comes
        group, store = world_of((1, 1, 1), rank), stores[rank]

        def form(group: Any = group, store: Any = store) -> None:
            with pytest.raises(RuntimeError, match="closed the store"):
                sum_of_ranks(group, store)

        threads.append(threading.Thread(target=form))
        threads[-1].start()
    wait_for_request(members[0], "wait", 1)
    for store in stores:
        store.close()
    joined(threads)


def test_a_lost_members_waits_are_dropped(members: list[Member]) -> None:
    leader = members[0].open()
    thread = failing(partial(members[1].open().get, "k"), "leader")
    wait_for_request(members[0], "wait", 1)
    members[1].line.close()
    members[1].stores.lost("a")
    joined([thread])
    members[0].wait(lambda m: ("closed", "b") in [e[:2] for e in m.events])
    assert not leader._waiting
