"""A generation context whose peers are stopped by SIGSTOP closes within a second."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.distributed import FileStore

from paceline.comm.communicator import Communicator, gather_counts
from paceline.config.world import SyncConfig
from paceline.errors import CommError
from paceline.generation.connector import connect
from paceline.generation.run import Run
from paceline.replica.replica import Replica
from paceline.update.batch_norm import BatchShare, convert_sync_batchnorm
from paceline.wiring.exchange import replicate
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.gloo_processes import spawn
from tests.harness.processes.worlds import open_context, world_of

CPU, LIMITS = torch.device("cpu"), (40.0, 40.0)  # longer than any wait of the test
RANKS, STEPS, WIDTH = 3, 3, 1000


class Rank:
    """A rank with all that a context may hold: layers, a synchronizer with windows, summaries."""

    def __init__(self, c: Communicator, folder: Path, machines: tuple[int, ...]) -> None:
        group = world_of(machines, c.rank)
        store = FileStore(str(folder / "store"), c.world_size)
        connecting = partial(connect, store=store, device=CPU, limits=LIMITS)
        self.context = open_context(group, connecting, device=CPU, limits=LIMITS)
        run = Run(context=self.context)
        run.open("data", "layers")
        share = BatchShare()
        self.norm = convert_sync_batchnorm(nn.BatchNorm1d(WIDTH), run, share)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        config = SyncConfig(sync="notified", bucket_mb=1)
        self.entering = threading.Event()  # set before the main thread waits
        self.replica: Replica = replicate(self.model, self.optimizer, run, config, share)

    def train(self, step: int) -> None:
        """Make a step, and send its summary."""
        with replica_step(self.replica, step, 1 / RANKS):
            self.model(torch.ones(2, WIDTH)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.context.summaries.send(step, torch.ones(3, dtype=torch.float64), stop=False)

    def wait_for(self, what: str) -> None:
        """Wait for what stopped peers don't send."""
        self.context.group("data", "layers").all_reduce(torch.ones(WIDTH * WIDTH))
        self.train(STEPS)
        self.entering.set()
        if what == "layers":
            self.norm(torch.randn(4, WIDTH))
        elif what == "windows":
            self.replica.settle()
        else:
            list(self.context.summaries.receive(before=STEPS + 1))

    def close(self, *, waiting: bool = True) -> None:
        """Close the context, once the main thread waits for a peer; note when."""
        if waiting:
            self.entering.wait()
            while not main_thread_waits():
                threading.Event().wait(0.01)
        self.began = time.monotonic()
        self.context.abort()
        self.ended = time.monotonic()


def close_beside_stopped_peers(
    c: Communicator, folder: str, machines: tuple[int, ...], what: str
) -> tuple[float, float, str]:
    """Close rank 0's context; return the seconds of that, those until its wait ended, and how."""
    rank = Rank(c, Path(folder), machines)
    for step in range(STEPS):
        rank.train(step)
    rank.replica.settle()
    list(rank.context.summaries.receive(before=STEPS))
    pids = gather_counts(c, os.getpid(), "the process ids")
    if c.rank > 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0.0, 0.0, ""
    peers = [psutil.Process(pid) for pid in pids[1:]]
    closing = threading.Thread(target=rank.close)
    try:
        while {peer.status() for peer in peers} != {psutil.STATUS_STOPPED}:
            threading.Event().wait(0.01)
        if what == "nothing":
            rank.train(STEPS)
            rank.close(waiting=False)
            return rank.ended - rank.began, 0.0, ""
        closing.start()
        try:
            rank.wait_for(what)
        except CommError as error:
            wait_ended, text = time.monotonic(), str(error)
        closing.join()
        return rank.ended - rank.began, wait_ended - rank.began, text
    finally:
        for peer in peers:
            peer.resume()


def main_thread_waits() -> bool:
    """Return whether the main thread waits for a peer."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return frame.f_code.co_name in ("wait", "sleep")


@pytest.mark.alone
@pytest.mark.parametrize(
    ("machines", "what"),
    [
        ((2, 1), "nothing"),
        ((2, 1), "layers"),
        ((2, 1), "summaries"),
        ((2, 1), "windows"),
        ((3,), "windows"),
        ((1, 1, 1), "windows"),
    ],
)
def test_a_context_beside_stopped_peers_closes_within_a_second(
    machines: tuple[int, ...], what: str, tmp_path: Path
) -> None:
    """Also while the main thread waits for `what` of them."""
    given = (str(tmp_path), machines, what)
    seconds, until_wait_ended, error = spawn(RANKS, close_beside_stopped_peers, *given)[0]
    assert seconds <= 1
    assert until_wait_ended <= 1
    assert error.startswith("rank 0 lost a peer" if what != "nothing" else "")
