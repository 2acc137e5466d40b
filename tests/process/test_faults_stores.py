"""The fault suite's stores: the store of a run is lost in mid-run, and then one of its workers.

The store is served by machine 0's supervisor, by Redis or etcd, or it is a shared folder. The run
has two machines, of two workers and one: with all but the first, the store is their witness, too.
So each run loses a vote, and then a worker. It must train the same bits as a run that begins from
the same step with the same workers.
"""

from __future__ import annotations

import functools
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from paceline.reduce.rank_state import MISSED
from paceline.state.checkpoint_files import read_checkpoint
from tests.harness.network.etcd_server import etcd_server
from tests.harness.network.ports import free_port
from tests.harness.network.redis_server import redis_server
from tests.harness.processes.fault_replays import FaultReplays
from tests.harness.processes.fault_runs import (
    EXACT,
    FIRST_KILL,
    SINGLE,
    FaultRun,
    distance,
    requires_exact,
)

MACHINES, LEFT = (2, 1), (1, 1)
SECOND_KILL = 14
NOTIFIED = ("--sync", "notified", "--bucket_mb", "0.01")
INT8 = ("--wire", "int8")
SYNCS = {
    "allreduce": ("--sync", "allreduce"),
    "replicated": NOTIFIED,
    "sharded": (*NOTIFIED, "--update", "sharded"),
    "int8": (*NOTIFIED, *INT8, *SINGLE),
}
AVERAGE = ("--sync", "average", "--bucket_mb", "0.002", "--average_every", "4")
Store = tuple[tuple[str, ...], Callable[[FaultRun], None]]
"""The flags of a rendezvous, and what makes a run lose it."""


@contextmanager
def store_host(folder: Path) -> Iterator[Store]:
    yield ("--master", f"127.0.0.1:{free_port()}"), FaultRun.kill_supervisor


@contextmanager
def redis(folder: Path) -> Iterator[Store]:
    with ExitStack() as server:
        url = server.enter_context(redis_server())
        yield ("--redis_url", url), lambda run: server.close()


@contextmanager
def etcd(folder: Path) -> Iterator[Store]:
    with ExitStack() as server:
        endpoint = server.enter_context(etcd_server(folder))
        yield ("--etcd", endpoint), lambda run: server.close()


@contextmanager
def shared_folder(folder: Path) -> Iterator[Store]:
    def remove(run: FaultRun) -> None:
        shutil.rmtree(path.rename(folder / "removed"))

    path = folder / "meet"
    path.mkdir()
    yield ("--file_store_path", str(path)), remove


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> FaultReplays:
    return FaultReplays(tmp_path_factory)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FaultRun]:
    """Return an undisturbed run, which has a checkpoint of each step, by its exchange."""
    made: dict[str, FaultRun] = {}

    def train(sync: str) -> FaultRun:
        if sync not in made:
            saving = ("--checkpoint_steps", "1", "--keep_checkpoints", "99")
            words = (*SYNCS[sync], *saving, "--master", f"127.0.0.1:{free_port()}")
            made[sync] = FaultRun(tmp_path_factory.mktemp(sync), *words, machines=MACHINES)
            requires_end(made[sync])
        return made[sync]

    return train


@pytest.fixture(scope="module")
def continued(
    undisturbed: Callable[[str], FaultRun], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], FaultRun]:
    """Return a run that begins from a step of the undisturbed one with the workers left."""

    @functools.cache
    def train(sync: str, start: int) -> FaultRun:
        resume = ("--resume", str(undisturbed(sync).checkpoint(start)))
        words = (*SYNCS[sync], *resume, "--master", f"127.0.0.1:{free_port()}")
        replay = FaultRun(tmp_path_factory.mktemp("replay"), *words, machines=LEFT)
        requires_end(replay)
        return replay

    return train


def requires_end(run: FaultRun) -> None:
    run.release()
    for ended in run.wait_all():
        assert ended.status == 0, ended.text


def lose_both(
    folder: Path,
    store: Callable[[Path], AbstractContextManager[Store]],
    sync: tuple[str, ...],
    lost: int,
) -> FaultRun:
    """Train a run that loses its store, and then a worker; the others' processes continue."""
    with store(folder) as (words, lose):
        run = FaultRun(folder, *sync, *words, machines=MACHINES)
        run.reach(FIRST_KILL)
        lose(run)
        run.reach(SECOND_KILL)
        run.kill(lost)
        run.release()
        ends = run.wait_all()
    text = "".join(end.text for end in ends)
    killed = -signal.SIGKILL if store is store_host else 0
    assert [end.status for end in ends] == [killed, 0], text
    assert "2 processes continue from step " in text
    assert "Traceback" not in text
    requires_exact(run)
    left = [rank for rank in range(3) if rank != lost]
    assert run.completed() == left
    assert run.evaluated() <= set(run.pids.values())
    return run


@pytest.mark.parametrize(
    ("store", "sync", "lost"),
    [
        (store_host, "allreduce", 0),
        (redis, "sharded", 1),
        (etcd, "sharded", 0),
        (shared_folder, "replicated", 1),
        (shared_folder, "int8", 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_run_survives_the_loss_of_its_store_and_then_that_of_a_worker(
    tmp_path: Path,
    undisturbed: Callable[[str], FaultRun],
    continued: Callable[[str, int], FaultRun],
    store: Callable[[Path], AbstractContextManager[Store]],
    sync: str,
    lost: int,
) -> None:
    run = lose_both(tmp_path, store, SYNCS[sync], lost)
    (start,) = run.starts()
    whole = undisturbed(sync)
    replay = continued(sync, start)
    for rank in run.completed():
        assert distance(run.weights_of(rank), replay.weights()) == 0
    if sync == "int8":
        groups = read_checkpoint(whole.checkpoint(start))["exchange"][MISSED]
        assert all(any(one.any() for one in group.values()) for group in groups)  # of each machine
    else:
        assert distance(replay.weights(), whole.weights()) < EXACT


@pytest.mark.parametrize(
    ("store", "lost"),
    [(store_host, 1), (redis, 0)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_run_that_averages_survives_the_loss_of_its_store_and_then_that_of_a_worker(
    tmp_path: Path,
    replays: FaultReplays,
    store: Callable[[Path], AbstractContextManager[Store]],
    lost: int,
) -> None:
    run = lose_both(tmp_path, store, AVERAGE, lost)
    replay = replays.weights(AVERAGE, MACHINES, run.changes())
    for weights in (run.weights(), *map(run.weights_of, run.completed())):
        assert distance(weights, replay) == 0


def test_two_workers_of_two_machines_are_lost_at_once_with_a_lossy_wire(
    tmp_path: Path, replays: FaultReplays
) -> None:
    machines = (2, 2)
    words = (*SYNCS["int8"], "--master", f"127.0.0.1:{free_port()}")
    run = FaultRun(tmp_path, *words, machines=machines)
    run.reach(FIRST_KILL)
    run.kill(0, 3)  # neither is the backup holder of the other
    run.release()
    for ended in run.wait_all():
        assert ended.status == 0, ended.text
        assert "Traceback" not in ended.text
    requires_exact(run)
    assert run.completed() == [1, 2]
    assert run.evaluated() <= set(run.pids.values())
    replay = replays.weights(NOTIFIED + INT8, machines, run.changes(), dtype="float32")
    for weights in (run.weights(), *map(run.weights_of, run.completed())):
        assert distance(weights, replay) == 0
