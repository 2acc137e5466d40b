"""One suite over the stores: shared folder, Redis, etcd, TCP, and values sealed by a secret."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from paceline.cluster.stores.store_spec import StoreSpec, erase, open_store, peek
from tests.harness.network.stores import LIMIT, on_processes, store_of
from tests.harness.processes.gloo_all_reduce import sum_of_ranks
from tests.harness.processes.worlds import world_of

KINDS = ["folder", "redis", "etcd", "tcp", "sealed tcp"]
BINARY = bytes(range(256)) * 3


@pytest.fixture(params=KINDS)
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreSpec]:
    with store_of(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def store(spec: StoreSpec) -> Store:
    return open_store(spec, LIMIT)


def test_values_come_back_byte_by_byte(store: Store) -> None:
    for key, value in {"a": BINARY, "b/c": b"", "big": BINARY * 2000, "text": "é"}.items():
        store.set(key, value)
        assert store.get(key) == (value.encode() if isinstance(value, str) else value)


@pytest.mark.parametrize("key", ["a/b/../c", ".", "ключ", "a b=c%2F", "long/" * 100])
def test_any_text_is_a_key_of_its_own(store: Store, key: str) -> None:
    store.set(key, "one")
    store.set(key + "'", "another")
    assert store.get(key) == b"one"


def test_the_last_value_set_is_the_value(store: Store, spec: StoreSpec) -> None:
    reader = open_store(spec, LIMIT)
    for number in range(5):
        store.set("k", str(number))
        assert reader.get("k") == str(number).encode()


def test_get_waits_until_somebody_sets_the_key(store: Store, spec: StoreSpec) -> None:
    waits = threading.Event()

    def set_later() -> None:
        waits.wait()
        open_store(spec, LIMIT).set("late", "value")

    thread = threading.Thread(target=set_later)
    thread.start()
    waits.set()
    assert store.get("late") == b"value"
    thread.join()


def test_waiting_ends_at_its_limit(store: Store) -> None:
    store.set("there", "1")
    begin = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"never"):
        store.wait(["there", "never"], timedelta(seconds=0.2))
    assert 0.15 < time.monotonic() - begin < 5


def test_get_ends_at_the_stores_own_limit(spec: StoreSpec) -> None:
    store = open_store(spec, LIMIT)
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError):
        store.get("never")


def test_check_wants_all_keys(store: Store) -> None:
    store.set("a", "1")
    store.set("b", "2")
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])
    assert peek(store, "c") is None


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
    store: Store, before: str | None, expected: str, desired: str, after: bytes
) -> None:
    if before is not None:
        store.set("k", before)
    assert store.compare_set("k", expected, desired) == after
    assert peek(store, "k") == (None if (before, expected) == (None, "old") else after)


def test_counters_start_at_nothing_and_can_be_read(store: Store) -> None:
    assert store.add("n", 0) == 0
    assert store.add("n", 7) == 7
    assert store.add("n", -3) == 4
    assert store.get("n") == b"4"


def test_append_and_several_at_once(store: Store) -> None:
    store.append("a", b"one")  # type: ignore[attr-defined]  # missing in torch's stubs
    store.append("a", BINARY)  # type: ignore[attr-defined]
    store.multi_set(["b", "c"], ["2", "3"])  # type: ignore[attr-defined]
    assert store.multi_get(["c", "a", "b"]) == [b"3", b"one" + BINARY, b"2"]


def test_deleted_keys_are_gone_and_can_come_back(store: Store) -> None:
    store.set("kept", "1")
    store.set("k", "1")
    assert store.delete_key("k")
    assert not store.delete_key("k")
    assert not store.check(["k"])
    assert store.check(["kept"])
    assert store.compare_set("k", "", "2") == b"2"


def test_a_space_holds_only_its_own(spec: StoreSpec) -> None:
    outer, inner = (open_store(s, LIMIT) for s in (spec, spec.subspace("inner")))
    outer.set("k", "outer")
    inner.set("k", "inner")
    assert (outer.get("k"), inner.get("k")) == (b"outer", b"inner")
    erase(spec.subspace("inner"))
    assert outer.get("k") == b"outer"
    if spec.kind != "tcp":  # that one goes with its server
        assert not open_store(spec.subspace("inner"), LIMIT).check(["k"])


def test_a_spec_survives_its_text(spec: StoreSpec) -> None:
    assert StoreSpec.from_text(spec.to_text()) == spec
    assert spec.address not in repr(spec)


def race(store: Store, number: int, count: int) -> tuple[list[int], list[bytes]]:
    """Add to a counter, claim places, and count by compare-and-set, beside other processes."""
    added = [store.add("added", 1) for _ in range(15)]
    claimed = [store.compare_set(f"place/{i}", "", f"process {number}") for i in range(10)]
    for _ in range(10):
        while True:
            value = peek(store, "counted") or b""
            # The writer's name makes each value unique: that it stands means that we set it.
            wanted = f"{int(value.split()[0] or b'0') + 1 if value else 1} {number}"
            if store.compare_set("counted", value.decode(), wanted) == wanted.encode():
                break
    return added, claimed


def test_no_write_of_four_processes_is_lost(spec: StoreSpec) -> None:
    added, claimed = zip(*on_processes(spec, 4, race), strict=True)
    assert sorted(chain.from_iterable(added)) == list(range(1, 61))
    assert all(values == sorted(values) for values in added)
    store = open_store(spec, LIMIT)
    assert [*claimed] == [[store.get(f"place/{i}") for i in range(10)]] * 4
    assert store.get("counted").split()[0] == b"40"


def all_reduce(store: Store, number: int, count: int) -> float:
    return sum_of_ranks(world_of((count,), number), store)


def test_gloo_finds_its_peers_through_it(spec: StoreSpec) -> None:
    assert on_processes(spec, 3, all_reduce) == [3.0] * 3
