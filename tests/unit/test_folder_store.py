"""The shared folder's store where the contract can't look: leftovers, stragglers, a lost folder."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistStoreError

from paceline.cluster.stores.folder_store import FolderStore
from paceline.cluster.stores.store_spec import StoreSpec, erase, open_store
from paceline.errors import CommError, ConfigError

LIMIT = timedelta(seconds=10)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(str(tmp_path), "run", LIMIT, make=True)


def files(store: FolderStore) -> list[str]:
    return sorted(name for _, _, names in os.walk(store.path) for name in names)


def test_old_values_dont_pile_up(store: FolderStore) -> None:
    for number in range(20):
        store.set("k", str(number))
    assert len(files(store)) == 2  # the head and the value that it names


def test_who_read_before_others_wrote_starts_again(store: FolderStore) -> None:
    """A process that stood still between reading and writing must not undo what came between."""
    other = store.clone()
    store.set("n", "0")
    seen = []

    def slow(old: bytes | None) -> bytes:
        seen.append(old)
        for _ in range(3 if len(seen) == 1 else 0):  # back to a version that was there before
            other.add("n", 1)
        return old + b"!"  # type: ignore[operator]

    assert store.update("n", slow) == b"3!"
    assert seen == [b"0", b"3"]


def test_who_read_before_the_key_was_made_anew_starts_again(store: FolderStore) -> None:
    other = store.clone()
    store.set("k", "first")
    seen = []

    def slow(old: bytes | None) -> bytes:
        seen.append(old)
        if len(seen) == 1:
            other.delete_key("k")
            other.set("k", "second")
        return b"ours"

    store.update("k", slow)
    assert seen == [b"first", b"second"]


def test_two_that_make_a_key_at_once_dont_both_win(store: FolderStore) -> None:
    other = store.clone()
    seen = []

    def slow(old: bytes | None) -> bytes | None:
        seen.append(old)
        if len(seen) == 1:
            assert other.compare_set("k", "", "theirs") == b"theirs"
        return b"ours" if old is None else old

    assert store.update("k", slow) == b"theirs"
    assert seen == [None, b"theirs"]


def test_what_a_killed_process_left_is_not_seen_and_hinders_nobody(store: FolderStore) -> None:
    store.set("k", "value")
    half = store.path / "tmp=dead"
    half.mkdir()
    (half / "head=0000000000000001=x").touch()
    (store.path / "key=k" / "orphan").write_bytes(b"never named by a head")
    assert store.get("k") == b"value"
    store.set("k", "next")
    assert store.get("k") == b"next"


def test_a_key_that_somebody_damaged_ends_in_a_sentence(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path), "", timedelta(seconds=0.1))
    (tmp_path / "key=k").mkdir()
    with pytest.raises(DistStoreError, match=r"key=k is damaged: it has no head file that"):
        store.get("k")


def test_a_removed_folder_is_said_and_not_made_again(store: FolderStore) -> None:
    store.path.rmdir()
    assert not store.check(["k"])
    with pytest.raises(CommError, match=r"run was removed"):
        store.set("k", "value")
    assert not store.path.exists()


def test_a_mistyped_folder_is_refused_not_made(tmp_path: Path) -> None:
    spec = StoreSpec(kind="folder", address=str(tmp_path / "typo"), space="run")
    with pytest.raises(ConfigError, match=r"typo: there is no such folder"):
        open_store(spec, LIMIT)
    assert not (tmp_path / "typo").exists()


def test_a_folder_that_cant_be_made_is_the_callers_mistake(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file is in the way")
    with pytest.raises(CommError, match=r"run failed: File exists"):
        FolderStore(str(tmp_path), "run", LIMIT, make=True)


def test_erasing_a_start_leaves_its_runs_folder_only_if_that_is_in_use(
    tmp_path: Path, store: FolderStore
) -> None:
    start = StoreSpec(kind="folder", address=str(tmp_path), space="run/start")
    open_store(start, LIMIT, make=True).set("k", "value")
    store.set("k", "value")
    (store.path / "tmp=dead").mkdir()
    erase(start)
    assert os.listdir(store.path) == ["key=k"]
    store.delete_key("k")
    erase(start)
    assert not store.path.exists()
    assert tmp_path.exists()
