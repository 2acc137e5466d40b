"""Work in decode processes whose results come in order."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from paceline.data import ordered_map as ordered_map_module
from paceline.data.ordered_map import ordered_map
from paceline.errors import DataError


def silent(done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("workers", [0, 1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 100])
def test_results_come_in_the_order_of_the_items(workers: int, count: int) -> None:
    got = ordered_map(lambda i: i * i, range(count), noun="item", workers=workers, meter=silent)
    assert list(got) == [i * i for i in range(count)]


def doubled(item: int) -> tuple[int, int, bytes]:
    return 2 * item, os.getpid(), bytes(item)


def in_company(folder: Path, item: int) -> int:
    """Leave a trace; who makes the first item waits for that of another process."""
    (folder / str(os.getpid())).touch()
    end = time.monotonic() + 60
    while item == 0 and len(list(folder.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    return item


def test_many_items_are_shared_with_processes(tmp_path: Path) -> None:
    make = partial(in_company, tmp_path)
    results = list(ordered_map(make, range(300), noun="item", workers=3, meter=silent))
    assert results == list(range(300))
    assert len(list(tmp_path.iterdir())) > 1


def deadly(folder: Path, tests: int, item: int) -> int:
    """Kill each decode process at item 5; the thread of the tests has the first item until then."""
    end = time.monotonic() + 60
    while item == 0 and len(list(folder.iterdir())) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    if item == 5 and os.getpid() != tests:
        (folder / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_an_item_that_kills_its_process_is_named(tmp_path: Path) -> None:
    make = partial(deadly, tmp_path, os.getpid())
    named = r"^3 decode processes have died .* item 5; .* by SIGKILL\. .*: repair or remove it"
    with pytest.raises(DataError, match=named):
        list(ordered_map(make, range(300), noun="item", workers=2, meter=silent))


def test_a_result_that_is_too_long_for_its_room_is_made_again_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ordered_map_module, "_LONGEST", 100)
    results = [
        length
        for _, _, length in ordered_map(doubled, range(250), noun="item", workers=1, meter=silent)
    ]
    assert [len(each) for each in results] == list(range(250))


def test_no_more_than_some_rooms_are_begun_before_a_result_is_taken() -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        return item

    before = set(threading.enumerate())  # perhaps with a thread of an earlier test
    results = ordered_map(work, range(150), noun="item", workers=2, meter=silent)
    assert list(islice(results, 10)) == list(range(10))
    results.close()
    assert max(begun) < 33
    assert not set(threading.enumerate()) - before


def test_an_exception_comes_at_its_items_place() -> None:
    def work(item: int) -> int:
        if item >= 3:
            raise ValueError(item)
        return item

    results = ordered_map(work, range(10), noun="item", workers=2, meter=silent)
    assert list(islice(results, 3)) == [0, 1, 2]
    with pytest.raises(
        DataError, match=r"^item 3 can't be decoded \(ValueError: 3\): repair or remove it\."
    ):
        next(results)


def test_no_more_processes_are_used_than_the_queue_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ordered_map_module, "MAX_WORKERS", 1)
    results = list(ordered_map(doubled, range(250), noun="item", workers=300, meter=silent))
    assert {process for _, process, _ in results} == {os.getpid()}


def test_no_memory_for_results_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_map_module._ItemMaker, "sample_bytes", 2**58)
    with pytest.raises(DataError, match=r"tried to allocate .*: free memory, or use fewer .*--wor"):
        list(ordered_map(str, range(3), noun="item", workers=1, meter=silent))


def test_the_meter_is_told_after_each_result() -> None:
    told: list[tuple[int, int]] = []
    results = ordered_map(
        str, range(3), noun="item", workers=1, meter=lambda *pair: told.append(pair)
    )
    next(results)
    assert told == []
    next(results)
    assert told == [(1, 3)]
    assert list(results) == ["2"]
    assert told == [(1, 3), (2, 3), (3, 3)]
