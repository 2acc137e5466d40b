"""Work in threads whose results come in order."""

from __future__ import annotations

import threading
from itertools import islice

import pytest

from paceline.data.ordered_map import ordered_map


def silent(done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("workers", [0, 1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 100])
def test_results_come_in_the_order_of_the_items(workers: int, count: int) -> None:
    got = ordered_map(lambda i: i * i, range(count), workers=workers, meter=silent)
    assert list(got) == [i * i for i in range(count)]


def test_a_slow_first_item_is_waited_for() -> None:
    others_done = threading.Semaphore(0)

    def work(item: int) -> int:
        if item == 0:
            for _ in range(4):  # a window of four items a thread: so many come after the first
                assert others_done.acquire(timeout=10)
        else:
            others_done.release()
        return item

    assert list(ordered_map(work, range(30), workers=2, meter=silent)) == list(range(30))


def test_no_more_than_a_window_is_begun_before_a_result_is_taken() -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        return item

    results = ordered_map(work, range(1000), workers=2, meter=silent)
    assert list(islice(results, 10)) == list(range(10))
    results.close()
    assert max(begun) < 10 + 8
    assert not [t for t in threading.enumerate() if t.name.startswith("paceline-images")]


def test_an_exception_comes_at_its_items_place() -> None:
    def work(item: int) -> int:
        if item >= 3:
            raise ValueError(item)
        return item

    results = ordered_map(work, range(10), workers=2, meter=silent)
    assert list(islice(results, 3)) == [0, 1, 2]
    with pytest.raises(ValueError, match="3"):
        next(results)


def test_the_meter_is_told_after_each_result() -> None:
    told: list[tuple[int, int]] = []
    results = ordered_map(str, range(3), workers=1, meter=lambda *pair: told.append(pair))
    next(results)
    assert told == []
    next(results)
    assert told == [(1, 3)]
    assert list(results) == ["2"]
    assert told == [(1, 3), (2, 3), (3, 3)]
