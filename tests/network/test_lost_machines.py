"""Machines of a run are lost, or lose each other: one side continues, the other writes and stops."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.harness.network.machine_runs import EPOCHS, STEPS, MachineRun
from tests.harness.network.redis_server import redis_server
from tests.harness.network.switched_machines import Switch, switched_machines

FOLDER = ("--file_store_path", "../meet")
ALLREDUCE = ("--sync", "allreduce")
SHARDED = ("--sync", "notified", "--update", "sharded", "--bucket_mb", "0.0001")
REACHED = 13  # the leader has saved two epochs
PEER_TIMEOUT = 2.0


@contextmanager
def started(
    folder: Path, switch: Switch, *words: str, workers: tuple[int, ...]
) -> Iterator[MachineRun]:
    """Start a run inside the block, and let it reach its middle."""
    (folder / "meet").mkdir()
    run = MachineRun(folder, switch, *words, workers=workers, peer_timeout=PEER_TIMEOUT)
    try:
        run.reach(REACHED)
        yield run
    finally:
        run.end()


@pytest.fixture
def pair() -> Iterator[Switch]:
    with switched_machines(2) as made:
        yield made


@pytest.fixture
def three() -> Iterator[Switch]:
    with switched_machines(3) as made:
        yield made


def master(switch: Switch) -> tuple[str, ...]:
    """Return the words of a rendezvous that can be no witness: machine 0 serves it."""
    return ("--master", f"{switch.machines[0].address}:29500")


@contextmanager
def redis_on(switch: Switch) -> Iterator[tuple[str, ...]]:
    """Run a Redis server at the switch; yields the words of the rendezvous there."""
    with redis_server(address=switch.address, inside=("ip", "netns", "exec", switch.name)) as url:
        yield ("--redis_url", url)


def requires_exact(run: MachineRun, *machines: int) -> None:
    """Require that these machines' files prove that each sample was trained once."""
    proof = run.proof(*machines)
    assert proof.exact, proof.faults
    assert proof.done == STEPS * EPOCHS


def test_the_smaller_machine_continues_alone_where_a_folder_is_the_witness(
    pair: Switch, tmp_path: Path
) -> None:
    with started(tmp_path, pair, *FOLDER, *SHARDED, workers=(2, 1)) as run:
        pair.send(0, signal.SIGKILL)
        run.release()
        ended = run.wait(1)
    assert ended.status == 0, ended.text
    assert "1 process continues from step " in ended.text
    requires_exact(run, 1)


@pytest.mark.parametrize("witness", ["none", "redis"])
def test_of_two_machines_that_lose_each_other_one_continues(
    pair: Switch, tmp_path: Path, witness: str
) -> None:
    words = redis_on(pair) if witness == "redis" else nullcontext(master(pair))
    with words as given, started(tmp_path, pair, *given, *ALLREDUCE, workers=(2, 1)) as run:
        before = [run.checkpoints(machine) for machine in (0, 1)]
        pair.separate(0, 1)
        run.release()
        ends = [run.wait(machine) for machine in (0, 1)]
        for m in (0, 1):
            print(m, ends[m].status, before[m], run.checkpoints(m))
            print(ends[m].text)
            for p in sorted(run.run_folder(m).rglob("*")):
                print(p)
    winner = [end.status for end in ends].index(0)
    requires_exact(run, winner)
    assert 0


def test_two_of_three_machines_continue_without_the_leaders(three: Switch, tmp_path: Path) -> None:
    with started(tmp_path, three, *master(three), *SHARDED, workers=(1, 1, 1)) as run:
        before = [run.checkpoints(machine) for machine in (0, 1, 2)]
        three.unplug(0)
        run.release()
        ends = [run.wait(machine) for machine in (0, 1, 2)]
        for m in (0, 1, 2):
            print(m, ends[m].status, before[m], run.checkpoints(m))
            print(ends[m].text)
            for p in sorted(run.run_folder(m).rglob("*")):
                print(p)
    assert 0
