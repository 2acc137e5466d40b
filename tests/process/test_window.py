"""Windows between real processes: who dies is noticed, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness.network.window_kinds import installed
from tests.harness.processes.bad_inputs import NULL
from tests.harness.processes.command import run
from tests.harness.processes.fork_server import ServedPopen
from tests.harness.processes.run_folders import losses, write_net

TRAIN = (
    f"{NULL} --epoch_size 30 --num_labels 3 --batch_size 5 --model net:plain --run_id r "
    "--num_epochs 1 --num_workers 2 --sync notified --bucket_mb 0.001"
)
PROGRAM = """
import os
import sys
from datetime import timedelta
import torch
from torch.distributed import FileStore
from paceline.comm.transport.bootstrap import Bootstrap
from tests.harness.twins.stored_addresses import StoredAddresses
from paceline.comm.nixl.window import nixl_window
from paceline.comm.connection_window import connect_window
from paceline.errors import PacelineError

rank, path, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = FileStore(path, 3)
store.set_timeout(timedelta(seconds=60))
addresses = StoredAddresses(store)
at = Bootstrap(addresses=addresses, rank=rank, world_size=3, token="t", purpose="w", limit=60)
if kind == "nixl":
    window = nixl_window(at, "127.0.0.1", 4_000_000, 1)
else:
    machine = range(3) if kind == "shared" else [rank]
    window = connect_window(at, machine, "127.0.0.1", 4_000_000, 1)
for peer in range(3):
    if peer != rank:
        window.put(peer, 1_000_000 * rank, torch.full((250_000,), float(rank)), 0, 1)
for peer in range(3):
    if peer != rank:
        window.wait(peer, 0, 1, limit=60, operation="the first put")
        assert (window.memory[1_000_000 * peer :][:1_000_000].view(torch.float32) == peer).all()
if kind != "nixl" and os.fork() == 0:  # as a DataLoader's worker, which lives on for a while
    os.close(1)
    sys.stdin.read()
    os._exit(0)
print("ready", flush=True)
try:
    window.wait((rank + 1) % 3, 0, 2, limit=60, operation="the next put")
except PacelineError as error:
    print(error, flush=True)
"""


@contextmanager
def ranks(folder: Path, kind: str = "shared") -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        ServedPopen(
            [sys.executable, "-c", PROGRAM, str(rank), str(folder / "store"), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def held_by(processes: list[subprocess.Popen[str]]) -> set[str]:
    """Return what processes have open or mapped: files and sockets, as the kernel names them."""
    folders = [Path(f"/proc/{p.pid}/{kind}") for p in processes for kind in ("fd", "map_files")]
    return {os.readlink(entry) for folder in folders for entry in folder.iterdir()}


def left_of(held: set[str]) -> list[str]:
    """List what is left of it: files in memory, and sockets without a file."""
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    left = [fields[7] for fields in sockets if len(fields) > 7 and f"socket:[{fields[6]}]" in held]
    files = [name for name in held if name.startswith("/dev/shm/") and Path(name).exists()]
    return files + [name for name in left if name.startswith("@paceline-")]


@pytest.mark.parametrize("kind", installed(["shared", "tcp", "nixl"]))
def test_a_killed_rank_is_named_by_who_waits_for_it(tmp_path: Path, kind: str) -> None:
    with ranks(tmp_path, kind) as processes:
        processes[1].kill()
        said, _ = processes[0].communicate(timeout=60)
    assert said == "rank 0 lost rank 1 in the next put: the peer closed the connection.\n"


@pytest.mark.parametrize("way", installed(["nixl"]))
def test_a_training_is_the_same_by_nixl(tmp_path: Path, way: str) -> None:
    found = []
    for number, words in enumerate(["tcp", way]):
        (folder := tmp_path / str(number)).mkdir()
        write_net(folder)
        ended = run(*f"{TRAIN} --transport {words}".split(), folder=folder)
        assert ended.status == 0, ended.text
        found.append(losses(folder / "runs/r"))
    assert found[0] == found[1]
    assert len(found[0]) == 6


@pytest.mark.skipif(find_spec("nixl") is not None, reason="NIXL is installed")
def test_nixl_that_is_missing_is_told_before_anything_is_written(tmp_path: Path) -> None:
    write_net(tmp_path)
    ended = run(*f"{TRAIN} --transport nixl".split(), folder=tmp_path)
    assert (ended.status, (tmp_path / "runs").exists()) == (2, False), ended.text
    said = r"--transport nixl needs .* is not installed; run pip install 'paceline\[nixl\]'"
    assert re.search(said, ended.text)


def test_ranks_that_are_all_killed_leave_nothing(tmp_path: Path) -> None:
    with ranks(tmp_path) as processes:
        held = held_by(processes)
        assert any("paceline window" in name for name in held)
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        assert left_of(held) == []
