"""A script as users write it, to be started by launchers and hurt by tests.

    python -m tests.harness.library.library_script RUN
        [--epochs 3] [--joins 1] [--fail RANK:STEP:HOW] [--sync notified]
        [--wait_at STEP]

With `--joins 2` the first world is closed after the given epochs, and a second one trains as many
more. Rank 0 prints each step's number and loss, exactly. `HOW` is what the failing rank does:
"raise", "config", "exit", "leave" (it ends well, in mid-epoch), "flip" (a bit of a parameter flips
in its memory), "skip" (no update in this step). Before step `--wait_at` it waits
to be killed.
"""

from __future__ import annotations

import argparse
import signal
import sys

import torch

import paceline
from tests.harness.library.small_training import BATCH, loss_of, network, samples, sgd


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--joins", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2, help="of checkpoints")
    parser.add_argument("--fail", default="-1:-1:nothing")
    parser.add_argument("--sync", default="allreduce")
    parser.add_argument("--wait_at", type=int, default=-1)
    parser.add_argument("--evaluate_until_stopped", action="store_true")
    options = parser.parse_args()
    tokens, numbers = set(), []
    for i in range(options.joins):
        world = train(options, options.epochs * (i + 1))
        numbers.append(world.generation)
        tokens.add(world._run.context.world.generation.token)
        if i + 1 < options.joins:
            world.close()
    assert len(tokens) == options.joins, "two worlds had one token"
    if options.run:
        assert numbers == [*range(numbers[0], numbers[0] + options.joins)]


def train(options: argparse.Namespace, epochs: int) -> paceline.World:
    rank, number, how = options.fail.split(":")

    world = paceline.join(options.run or None, checkpoint_steps=options.steps, timeout=20)
    model = network(dropout=0.3)
    optimizer = sgd(model)
    paceline.parallelize(model, optimizer, world, sync=options.sync)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15)
    world.track(schedule)
    loader = paceline.loader(samples(), BATCH, world)
    for _ in range(loader.epoch, epochs):
        for x, y in loader:
            step = world.steps
            if (world.rank, step) == (int(rank), int(number)):
                fail(how, model)
            if step == options.wait_at:
                signal.sigtimedwait({signal.SIGUSR1}, 60)
                raise AssertionError("no process has killed this run")
            with world.step():
                loss = loss_of(model, x, y)
                loss.backward()
                if (world.rank, step, how) != (int(rank), int(number), "skip"):
                    optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            if world.rank == 0:
                print(f"step {step}: {loss.item().hex()}", flush=True)
        while options.evaluate_until_stopped:
            loss_of(model, *samples(10)[:])
    return world


def fail(how: str, model: torch.nn.Module) -> None:
    if how == "flip":
        [p.data for p in model.parameters()][-1].view(torch.int64)[0] ^= 1 << 40
    if how == "raise":
        raise KeyError("a bug of the script")
    if how == "config":
        raise paceline.ConfigError("the script says no.")
    if how == "exit":
        sys.exit(0x107)  # the system takes the low byte, 7
    if how == "leave":
        sys.exit()


if __name__ == "__main__":
    main()
