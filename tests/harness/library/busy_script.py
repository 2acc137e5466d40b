"""A script in which ranks do different things between steps, as scripts written for DDP do.

    python -m tests.harness.library.busy_script HOW [--run RUN] [--seconds S] [--idle_timeout S]

HOW is what happens after each epoch (with "stream-" before it, of a stream's loader):

    work         rank 0 works for S seconds: an evaluation of its own, a plot, an upload
    held         the same, with the interpreter's lock held
    hang         rank 0 works for ever, in `upload`
    killed       rank 0 works; after the first epoch, the last rank is killed meanwhile
    gone         rank 0 is killed in its work after the first epoch
    loader       rank 0 alone makes a loader
    evaluation   rank 0 alone calls world.evaluation()
    plain        rank 0 alone iterates an evaluation's loader
    total        rank 0 alone calls world.total()
    merge        rank 0 alone calls world.merge()
    peek         rank 0 looks at the first batch of an evaluation's loader, which is no evaluation

or what rank 0 alone does in the first epoch:

    preview      it looks at the first batch of the training loader, before all ranks iterate it
    break        it leaves the loop after the second step
    skip         it leaves out the second batch, without a step
    samples      it passes samples= to the second step

Each rank that reaches the end prints the ranks, and the sum of its weights.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from tests.harness.library.small_training import BATCH, loss_of, network, samples, sgd

EPOCHS = 2


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """A rank's own part of the samples."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        data = samples()
        for number in range(self.rank, len(data), self.world_size):
            yield data[number]


def work(seconds: float) -> None:
    threading.Event().wait(seconds)


def upload() -> None:
    threading.Event().wait()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def between(
    world: paceline.World, test: paceline.Loader, how: str, seconds: float, *, leads: bool
) -> None:
    """Do what `how` names; `leads`: this process was rank 0 at the start."""
    first = world.steps == test.steps
    if how == "killed" and first and world.rank == world.world_size - 1:
        work(seconds / 2)
        kill()
    if not leads:
        return
    if how in ("work", "killed"):
        work(seconds)
    elif how == "held":
        ctypes.PyDLL(None).sleep(int(seconds))
    elif how == "hang":
        upload()
    elif how == "gone" and first:
        work(seconds / 2)
        kill()
    elif how == "loader":
        paceline.loader(TensorDataset(torch.randn(8, 1)), 4, world, train=False)
    elif how == "evaluation":
        list(world.evaluation(test))
    elif how == "plain":
        list(test)
    elif how == "peek":
        next(iter(test))
    elif how == "total":
        world.total(torch.ones(1))
    elif how == "merge":
        world.merge()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how")
    parser.add_argument("--run")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--idle_timeout", type=float)
    options = parser.parse_args()
    world = paceline.join(options.run, timeout=options.timeout, idle_timeout=options.idle_timeout)
    model = network()
    optimizer = sgd(model)
    sync = "average" if options.how == "merge" else "auto"
    paceline.parallelize(model, optimizer, world, sync=sync)
    how = options.how.removeprefix("stream-")
    data = samples() if how == options.how else Stream(world.rank, world.world_size)
    loader = paceline.loader(data, BATCH, world)
    test = paceline.loader(samples(), BATCH, world, train=False)
    leads = world.rank == 0
    if how == "preview" and leads:
        next(iter(loader))
    for _ in range(loader.epoch, EPOCHS):
        for x, y in loader:
            acts = leads and loader.step == 1
            if how == "skip" and acts:
                continue
            with world.step(samples=len(x) if how == "samples" and acts else None):
                loss_of(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if how == "break" and acts:
                break
        between(world, test, how, options.seconds, leads=leads)
    world.settle()
    weights = sum(float(value.double().sum()) for value in model.state_dict().values())
    print(f"ended with {world.world_size} ranks, weights {weights:.10f}", flush=True)
    world.close()


if __name__ == "__main__":
    main()
