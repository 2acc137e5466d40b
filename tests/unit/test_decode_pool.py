"""What the decode pool says, and how long its waits may take."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import closing
from threading import Event
from typing import Any

import numpy as np
import pytest

from paceline.config.data import MAX_DECODE_WORKERS
from paceline.data.batch_maker import SwitchedBatches
from paceline.data.decoding.chunk_queue import MAX_WORKERS
from paceline.data.decoding.decode_pool import DecodeDevice, DecodePool, Work
from paceline.data.decoding.server_process import Ended
from paceline.data.source import Record, SourceLost
from paceline.errors import DataError
from tests.harness.data.loading import ListSource, host_batches, loader_of, numbered

SMALLER = "store smaller images with paceline db create --resize N."
GIVEN = DecodeDevice("cpu")
CHOSEN = DecodeDevice("cpu", measured=True)


def test_one_number_of_workers_is_the_most_for_flag_and_queue() -> None:
    """The thread of the training process is one more."""
    assert MAX_WORKERS == MAX_DECODE_WORKERS + 1


@pytest.mark.parametrize(
    ("workers", "limit", "cuda", "device", "told"),
    [
        (0, 15, False, GIVEN, "use --decode_workers 15 in place of 0."),
        (1, 15, True, GIVEN, "use --decode_workers 15 in place of 1."),
        (3, 3, False, GIVEN, f"no core is left for more decode processes; {SMALLER}"),
        (3, 3, True, GIVEN, "processes; use --decode_device auto to decode on the GPU, or store"),
        (3, 3, True, CHOSEN, f"no core is left for more decode processes; {SMALLER}"),
        (1, 15, True, DecodeDevice("cuda"), f"--decode_device cpu if cores are free, or {SMALLER}"),
        (1, 1, True, DecodeDevice("cuda", measured=True), f"faster here than the CPU; {SMALLER}"),
    ],
)
def test_the_remedy_of_waits_fits_what_decodes(
    workers: int, limit: int, cuda: bool, device: DecodeDevice, told: str
) -> None:
    with closing(DecodePool(workers, cuda=cuda, limit=limit, device=device)) as pool:
        assert told in pool.remedy()


@pytest.mark.parametrize("alone", ["--decode_workers 0", "--workers 1"])
def test_processes_that_end_again_and_again_name_the_flag_of_their_command(alone: str) -> None:
    with closing(DecodePool(1, alone=alone)) as pool:
        server = pool._new_server()
        pool._server = server
        pool._start_process(server, 1)
        for _ in range(4):
            pool._replace(server, Ended(1, 0, 1))
        told = f"was started 5 times and has ended each time; .* Free memory, or use {alone}: "
        with pytest.raises(DataError, match=told):
            pool._replace(server, Ended(1, 0, 1))


class ClosedSource(ListSource):
    """Raises what the operating system says, or a bare exception, in place of records."""

    def __getitem__(self, index: int) -> Record:
        if index:
            raise PermissionError(13, "Permission denied", "data.mdb")
        raise ValueError("no such thing")


def test_an_error_without_a_sentence_becomes_one() -> None:
    with closing(DecodePool(0)) as pool:
        batches = host_batches(pool, ClosedSource(numbered(2)))
        work = batches.begin(0, np.arange(2))
        assert batches.wait([work], 30)
        assert str(work.bad[0]) == (
            "record 0 can't be decoded (ValueError: no such thing): repair or remove it."
        )
        assert str(work.bad[1]) == (
            "record 1 can't be read (Permission denied: data.mdb): check the disk, and that this "
            "user may read its files."
        )


class FailingSource(ListSource):
    """Raises an error for record 1."""

    def __init__(self, error: Exception) -> None:
        super().__init__(numbered(4))
        self._error = error

    def __getitem__(self, index: int) -> Record:
        if index == 1:
            raise self._error
        return super().__getitem__(index)


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), r"record 1 can't be decoded \(MemoryError\): free memory, or start fewer"),
        (OSError(errno.EMFILE, "Too many"), r"record 1 can't be decoded \(OSError: .*Too many\)"),
        (SourceLost("the disk is gone: plug it in."), r"^the disk is gone: plug it in\.$"),
    ],
)
def test_what_is_not_a_records_fault_is_not_skipped(
    error: Exception, told: str, workers: int
) -> None:
    with loader_of(FailingSource(error), 4, workers=workers, skip_bad=True) as loader:
        for _ in range(2):  # a second wait doesn't begin to hang
            with pytest.raises(DataError, match=told):
                loader.batch(0, 0)


class BareMaker:
    """Raises an error before it makes a sample."""

    sample_bytes = 8
    pinned = False

    def numbers(self, epoch: int, records: Any) -> list[list[float]]:
        raise ValueError("no numbers")


def test_an_error_outside_of_any_record_ends_the_wait() -> None:
    with closing(DecodePool(0)) as pool:
        work = pool.begin(pool.add(BareMaker()), 0, np.arange(2))  # type: ignore[arg-type]
        with pytest.raises(DataError, match=r"Decoding can't go on \(ValueError: no numbers\): st"):
            pool.wait([work], 30)


class HeldSource(ListSource):
    """Gives record 0 once it may."""

    def __init__(self) -> None:
        super().__init__(numbered(8))
        self.asked = Event()
        self.may_give = Event()

    def __getitem__(self, index: int) -> Record:
        if index == 0:
            self.asked.set()
            assert self.may_give.wait(30)
        return super().__getitem__(index)


def test_a_buffer_that_is_still_written_to_is_not_given_to_others() -> None:
    source = HeldSource()
    with closing(DecodePool(0)) as pool:
        batches = host_batches(pool, source)
        given_up = batches.begin(0, np.arange(4))
        assert source.asked.wait(30)
        place = given_up.buffer.offset
        batches.release(given_up, None)
        other = batches.begin(0, np.arange(4, 8))
        assert other.buffer.offset != place
        source.may_give.set()
        assert batches.wait([other], 30)
        assert batches.begin(0, np.arange(4)).buffer.offset == place


def test_a_report_that_comes_with_the_end_of_its_batch_is_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(DecodePool(0)) as pool:
        batches = host_batches(pool, ClosedSource(numbered(2)))
        work = batches.begin(0, np.arange(2))
        monkeypatch.setattr(pool, "_attend", lambda waited: None)  # it has looked just before
        assert batches.wait([work], 30)
        assert {*work.bad} == {0, 1}


class WordySource(ListSource):
    """Raises a text of characters that take the most bytes in a report."""

    def __getitem__(self, index: int) -> Record:
        raise ValueError("\U0001d11e" * 20_000)


def test_a_long_report_is_cut_and_not_torn() -> None:
    with closing(DecodePool(0)) as pool:
        batches = host_batches(pool, WordySource(numbered(1)))
        work = batches.begin(0, np.arange(1))
        assert batches.wait([work], 30)
        told = "record 0 can't be decoded (ValueError: \U0001d11e"
        assert str(work.bad[0]).startswith(told)


class SlowBatches:
    """Maker that needs half the limit of each wait."""

    def __init__(self) -> None:
        self.limits: list[float] = []

    def begin(self, epoch: int, records: Any) -> Any:
        return Work(len(self.limits), 0, None, range(0))  # type: ignore[arg-type]

    def wait(self, makings: Sequence[Any], timeout: float) -> bool:
        self.limits.append(timeout)
        Event().wait(timeout / 2)
        return True


def test_a_wait_for_batches_of_both_devices_has_one_limit() -> None:
    slow: Any = SlowBatches()
    batches = SwitchedBatches(DecodeDevice("cpu"), slow, slow)
    making = batches.begin(0, np.arange(1))
    assert batches.wait([making] * 3, 0.1)
    whole, half, quarter = slow.limits
    assert half <= whole / 2
    assert quarter <= half / 2
