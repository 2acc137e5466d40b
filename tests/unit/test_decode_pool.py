"""What the decode pool says, and how long its waits may take."""

from __future__ import annotations

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
from paceline.data.source import Record
from paceline.errors import DataError
from tests.harness.data.loading import ListSource, host_batches, numbered

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
        with pytest.raises(DataError, match=f"Free memory, or use {alone}: "):
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
