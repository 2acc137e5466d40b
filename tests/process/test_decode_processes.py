"""Decode processes: the same bits as in one process, whatever happens to them."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.data.db.open_database import open_database
from paceline.data.decoding import decode_pool
from paceline.data.decoding.decode_pool import DecodePool
from paceline.data.decoding.fork_server import ServerSetup, serve
from paceline.data.decoding.server_process import Ended
from paceline.data.loader import DatabaseLoader
from paceline.data.order import Order
from paceline.data.source import Record
from paceline.errors import DataError
from tests.harness.data.databases import key, write_leveldb, write_lmdb, write_minidb
from tests.harness.data.image_folder import file_of, ramp
from tests.harness.data.loading import (
    RICH,
    ListSource,
    Notes,
    RankLoader,
    epoch_of,
    host_batches,
    loader_of,
    numbered,
    photographs,
)
from tests.harness.data.record_bytes import encoded_tensorprotos
from tests.harness.processes.fork_server import RealPopen

pytestmark = pytest.mark.usefixtures("forked_servers")
SEED = random.randrange(10**6)  # each run of the suite kills at other moments


class FatalSource(ListSource):
    """Ends the process that reads record 5, as an image does that takes all memory."""

    def __getitem__(self, index: int) -> Record:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class HangingSource(ListSource):
    """Never gives a record, as a disk that hangs."""

    def __getitem__(self, index: int) -> Record:
        select.select([], [], [])
        raise AssertionError


class OnceHangingSource(ListSource):
    """Hangs the first process that reads record 5, as one read of a failing disk."""

    def __init__(self, records: list[Record], marker: Path) -> None:
        super().__init__(records)
        self._marker = marker

    def __getitem__(self, index: int) -> Record:
        if index == 5 and not self._marker.exists():
            self._marker.touch()
            select.select([], [], [])
        return super().__getitem__(index)


class OftenFatalSource(ListSource):
    """Ends the process that is the first to read a record of each chunk."""

    def __init__(self, records: list[Record], markers: Path) -> None:
        super().__init__(records)
        self._markers = markers

    def __getitem__(self, index: int) -> Record:
        marker = self._markers / str(index)
        if index % 4 == 0 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def equal(found: list[Any], expected: list[Any]) -> bool:
    return all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) and a.place == b.place
        for a, b in zip(found, expected, strict=True)
    )


def processes_of(loader: RankLoader) -> dict[int, int]:
    server = loader.pool._server
    assert server is not None
    return server.processes


def varied(loader: RankLoader, shares: list[tuple[int, int]]) -> list[Any]:
    """Batches of an epoch whose shares change at each step, a jump back, another epoch."""
    batches = []
    for step, now in enumerate([(5, 5), (8, 2), (1, 9), (10, 0), (3, 7), (5, 5)]):
        shares[0] = now
        batches.append(loader.batch(1, step))
    return [*batches, loader.batch(1, 2), loader.batch(1, 3), *epoch_of(loader, 0)]


@pytest.mark.parametrize("workers", [1, 5])
def test_processes_make_the_bits_of_the_training_process(workers: int) -> None:
    records = photographs(61)
    records[7] = Record(b"no image", 0)
    records[30] = Record(records[30].image, 5)  # there are three labels
    shares = [(5, 5)]
    options: dict[str, Any] = {
        "transform": RICH,
        "world_size": 2,
        "shares": lambda number: shares[0],
        "skip_bad": True,
        "num_labels": 3,
    }
    told = [Notes(), Notes()]
    with loader_of(ListSource(records), 10, **options, recorder=told[0]) as loader:
        expected = varied(loader, shares)
    with loader_of(ListSource(records), 10, **options, workers=workers, recorder=told[1]) as loader:
        assert equal(varied(loader, shares), expected)
    assert told[0].texts == told[1].texts
    assert "record 7 can't be decoded" in " ".join(told[1].texts)


def test_training_and_evaluation_share_the_processes() -> None:
    pool = DecodePool(2)
    source, order = ListSource(numbered(40)), Order(size=40, batch_size=8, shuffle=False)
    train, test = (DatabaseLoader(order, host_batches(pool, source)) for _ in range(2))
    try:
        for step in range(4):
            places = [order.place(0, at, 0, 1) for at in (step, step + 1)]
            for loader in (train, test):
                labels = loader.batch(places[0], places[1:]).labels
                assert labels.tolist() == list(range(8 * step, 8 * step + 8))
        assert pool._server is not None
        assert {*pool._server.processes, *pool._server._requested} == {1, 2}
    finally:
        pool.close()


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_processes_that_are_killed_or_stopped_are_replaced(kind: signal.Signals) -> None:
    source = ListSource(photographs(160))
    chance = random.Random(SEED)
    with loader_of(source, 16, transform=RICH) as loader:
        expected = epoch_of(loader)
    notes = Notes()
    with loader_of(
        source, 16, transform=RICH, workers=3, recorder=notes, stopped_after=0.1
    ) as loader:
        found = []
        for step in range(loader.steps):
            found.append(loader.batch(0, step))
            if step % 3 == 0:
                os.kill(chance.choice([*processes_of(loader).values()]), kind)
        assert equal(found, expected), f"seed {SEED}"
        assert equal(epoch_of(loader), expected), f"seed {SEED}"
        if kind is signal.SIGKILL:  # an end may be noticed when the next epoch is decoded
            assert any("was killed by SIGKILL; it is replaced" in note for note in notes.texts)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fork_server_that_is_killed_or_stopped_is_replaced(kind: signal.Signals) -> None:
    source = ListSource(photographs(60))
    with loader_of(source, 12, transform=RICH) as loader:
        expected = epoch_of(loader)
    with loader_of(source, 12, transform=RICH, workers=2, stopped_after=0.1) as loader:
        found = [loader.batch(0, 0)]
        server = loader.pool._server
        assert server is not None
        os.kill(server.process.pid, kind)
        for process in server.processes.values():
            os.kill(process, signal.SIGKILL)
        found += [loader.batch(0, step) for step in range(1, loader.steps)]
        assert equal(found, expected)


def test_a_record_that_kills_three_processes_is_named() -> None:
    order = Order(size=8, batch_size=8, shuffle=False)
    with (
        loader_of(FatalSource(numbered(8)), 8, order=order, workers=2) as loader,
        pytest.raises(DataError, match=r"3 decode .* decoded record 5; the last one was killed by"),
    ):
        loader.batch(0, 0)


def test_processes_may_be_killed_again_and_again_while_others_work(tmp_path: Path) -> None:
    source = OftenFatalSource(numbered(60), tmp_path)
    order = Order(size=60, batch_size=60, shuffle=False)
    with loader_of(source, 60, order=order, workers=2) as loader:
        assert loader.batch(0, 0).labels.tolist() == list(range(60))
    assert len(list(tmp_path.iterdir())) == 15


def test_a_server_ends_when_the_training_process_is_killed_with_its_events_unread() -> None:
    training, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    requests.send(b"an event")
    training.close()
    serve(requests, ServerSetup(makers=(), queue=(-1, -1, -1), ring=-1, reports=-1))
    requests.close()


def test_a_process_that_hangs_while_others_work_is_replaced(tmp_path: Path) -> None:
    source = OnceHangingSource(numbered(40), tmp_path / "hung")
    order = Order(size=40, batch_size=40, shuffle=False)
    with loader_of(source, 40, order=order, workers=2, stopped_after=0.1) as loader:
        assert loader.batch(0, 0).labels.tolist() == list(range(40))
    assert (tmp_path / "hung").exists()


class SlowSource(ListSource):
    """Gives record 0 after a while: without use of the processor, as a slow disk, or with it."""

    def __init__(self, records: list[Record], *, computes: bool) -> None:
        super().__init__(records)
        self._computes = computes

    def __getitem__(self, index: int) -> Record:
        end = time.monotonic() + (1.2 if index == 0 else 0.08)
        while self._computes and time.monotonic() < end:
            pass
        select.select([], [], [], max(0.0, end - time.monotonic()))
        return super().__getitem__(index)


@pytest.mark.parametrize(("computes", "kills"), [(False, 1), (True, 0)])
def test_a_record_that_takes_long_is_made_all_the_same(
    computes: bool, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_pool, "_LOOK_S", 0.3)
    source = SlowSource(numbered(32), computes=computes)
    order = Order(size=32, batch_size=32, shuffle=False)
    notes = Notes()
    with loader_of(
        source, 32, order=order, workers=2, recorder=notes, stopped_after=0.05, timeout=60
    ) as loader:
        assert loader.batch(0, 0).labels.tolist() == list(range(32))
    assert len([note for note in notes.texts if "is killed" in note]) == kills


class OftenStoppedSource(ListSource):
    """Stops the processes that are the first three to read record 5."""

    def __init__(self, records: list[Record], markers: Path) -> None:
        super().__init__(records)
        self._markers = markers

    def __getitem__(self, index: int) -> Record:
        earlier = len(list(self._markers.iterdir()))
        if index == 5 and earlier < 3:
            (self._markers / str(earlier)).touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(index)


def test_a_record_is_not_to_blame_for_processes_that_were_killed_because_they_were_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_pool, "_LOOK_S", 0.05)
    order = Order(size=8, batch_size=8, shuffle=False)
    with loader_of(OftenStoppedSource(numbered(8), tmp_path), 8, order=order, workers=2) as loader:
        assert loader.batch(0, 0).labels.tolist() == list(range(8))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_fork_server_that_ends_between_two_looks_at_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = ListSource(photographs(60))
    with loader_of(source, 12, transform=RICH) as loader:
        expected = epoch_of(loader)
    with loader_of(source, 12, transform=RICH, workers=2, timeout=30) as loader:
        found = [loader.batch(0, 0)]
        server = loader.pool._server
        assert server is not None
        look = server.ended

        def look_before_the_end() -> list[Ended]:
            ended = look()
            monkeypatch.setattr(server, "ended", look)
            server.process.kill()
            server.process.wait()
            return ended

        monkeypatch.setattr(server, "ended", look_before_the_end)
        found += [loader.batch(0, step) for step in range(1, loader.steps)]
        assert equal(found, expected)


def test_a_disk_that_hangs_for_all_is_a_sentence_within_the_limit() -> None:
    with (
        loader_of(HangingSource(numbered(8)), 8, workers=2, timeout=0.3) as loader,
        pytest.raises(DataError, match=r"epoch 0, step 0 wasn't read within 0\.3 s"),
    ):
        loader.batch(0, 0)


@pytest.mark.parametrize("write", [write_lmdb, write_leveldb, write_minidb])
def test_processes_open_the_database_themselves(tmp_path: Path, write: Callable[..., None]) -> None:
    images = [file_of(ramp(12, 10, seed=i), "JPEG") for i in range(20)]
    values = [(key(i), encoded_tensorprotos(image, i)) for i, image in enumerate(images)]
    write(tmp_path / "data", values)
    source = open_database(tmp_path / "data")
    try:
        with loader_of(source, 8) as loader:
            expected = epoch_of(loader)
        with loader_of(source, 8, workers=2) as loader:
            assert equal(epoch_of(loader), expected)
    finally:
        source.close()


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("write", [write_lmdb, write_leveldb, write_minidb])
def test_a_database_that_is_replaced_is_not_mixed_with_its_successor(
    tmp_path: Path, write: Callable[..., None], gone: bool
) -> None:
    for name, label in (("data", 0), ("other", 1)):
        images = [file_of(ramp(12, 10, seed=i), "JPEG") for i in range(40)]
        values = [(key(i), encoded_tensorprotos(image, label)) for i, image in enumerate(images)]
        write(tmp_path / name, values)
    with (
        closing(open_database(tmp_path / "data")) as source,
        loader_of(source, 4, workers=1, skip_bad=True) as loader,
    ):
        loader.batch(0, 0)
        (tmp_path / "data").rename(tmp_path / "before")
        if not gone:
            (tmp_path / "other").rename(tmp_path / "data")
        (process,) = processes_of(loader).values()
        os.kill(process, signal.SIGKILL)
        told = "can't be opened again" if gone else "was changed or replaced since"
        with pytest.raises(DataError, match=f"data {told}.* to resume"):
            epoch_of(loader)


ORPHANED = """
import sys, time
from tests.harness.data.loading import *
with loader_of(ListSource(photographs(30)), 4, workers=3) as loader:
    loader.batch(0, 0)
    loader.batch(0, 1)
    server = loader.pool._server
    print(server.process.pid, *server.processes.values(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_processes_end_with_a_killed_training_process(stopped: bool) -> None:
    with RealPopen(
        [sys.executable, "-c", ORPHANED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as training:
        assert training.stdout is not None
        numbers = [int(number) for number in training.stdout.readline().split()]
        ends = [os.pidfd_open(number) for number in numbers]
        if stopped:
            for number in numbers:
                os.kill(number, signal.SIGSTOP)
        training.kill()
        for end in ends:
            assert select.select([end], [], [], 30)[0]
            os.close(end)
