"""A hunt for deadlocks: short trainings by `notified`, each drawn at random.

    python -m tests.harness.equivalence.deadlock_hunt
        [--runs 1000] [--kinds inprocess shared tcp machines] [--seed 0]

Drawn are the kind of window, the ranks and their machines, the model, the sizes of buckets and of
batches, how late puts are, and their priorities. A run that hasn't ended at the limit is shown,
with the stacks of all threads, and ends the hunt with status 1; so do ranks that differ.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn

from paceline.algorithms.data_parallel import DataParallel
from paceline.algorithms.notified import make_notified
from paceline.algorithms.open_exchange import PutOptions
from paceline.comm.communicator import Communicator
from paceline.comm.connection_window import connect_window
from paceline.comm.nixl.window import nixl_window
from paceline.comm.window import Window
from paceline.reduce.buckets import Bucket
from paceline.reduce.put_engine.layout import Topology
from tests.harness.equivalence.large_batch import Training, largest_difference, made_up_batches
from tests.harness.equivalence.put_synchronizers import flags_of
from tests.harness.network.window_kinds import Make, bootstraps
from tests.harness.twins.faulty_window import Faults, FaultyWindow
from tests.harness.twins.window import WindowGroup
from tests.harness.twins.window_context import WindowContext

KINDS = ("inprocess", "shared", "tcp", "machines")
ALL_KINDS = (*KINDS, "nixl")
ADDRESS = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What one run is; `delay` is in seconds, and None leaves windows as they are."""

    seed: int
    kind: str
    machines: tuple[int, ...]
    widths: tuple[int, ...]
    normalised: bool
    batches: tuple[int, ...]
    bucket_bytes: int
    delay: float | None
    connections: int

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(self.machines)


def draw(seed: int, kinds: Sequence[str] = KINDS) -> Draw:
    """Draw a run, a function of the seed."""
    generator = random.Random(seed)
    kind = generator.choice(kinds)
    world_size = generator.randint(2, 5)
    cuts = sorted(generator.sample(range(1, world_size), generator.randrange(world_size)))
    machines = [b - a for a, b in zip([0, *cuts], [*cuts, world_size], strict=True)]
    apart = (1,) * world_size
    alone = {"shared": (world_size,), "tcp": apart, "nixl": apart}
    return Draw(
        seed=seed,
        kind=kind,
        machines=alone.get(kind, tuple(machines)),
        widths=tuple(generator.choice([1, 3, 17, 64]) for _ in range(generator.randint(1, 4))),
        normalised=generator.random() < 0.3,
        batches=tuple(generator.randint(1, 8) for _ in range(generator.randint(3, 6))),
        bucket_bytes=int(10 ** generator.uniform(0, 6)),
        delay=generator.choice([None, 0.0, 1e-4, 2e-3]),
        connections=generator.choice([1, 1, 3]),
    )


def train(drawn: Draw, limit: float) -> None:
    """Train, and compare the ranks.

    Raises:
        AssertionError: they differ.
        CommError: one waited for another for `limit` seconds.
    """
    torch.manual_seed(drawn.seed)
    training = Training(
        model(drawn),
        lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
        made_up_batches(drawn.batches),
    )
    first, *others = training.on_threads(
        drawn.world_size, drawn.bucket_bytes, notified(drawn, limit)
    )
    for other in others:
        assert largest_difference(first, other) == 0, f"ranks differ in {drawn}"


def model(drawn: Draw) -> nn.Module:
    """Make a small perceptron in float64."""
    layers: list[nn.Module] = [nn.BatchNorm2d(3)] if drawn.normalised else []
    layers.append(nn.Flatten())
    width = 3 * 8 * 8
    for following in drawn.widths:
        layers += [nn.Linear(width, following), nn.ReLU()]
        width = following
    return nn.Sequential(*layers, nn.Linear(width, 10)).double()


def notified(drawn: Draw, limit: float) -> Callable[..., Any]:
    """Return what makes each rank's synchronizer, whose puts are late and overtake each other."""
    open_window = opened_by(drawn, limit)
    made: Counter[int] = Counter()

    def make(buckets: Sequence[Bucket], communicator: Communicator, *parts: Any) -> DataParallel:
        rank = communicator.rank

        def open_one(size: int, notifications: int) -> Window:
            binding = made[rank]
            made[rank] += 1
            window = open_window(binding, size, notifications)(rank)
            if drawn.delay is None:
                return window
            flags = flags_of(notifications)
            faults = Faults(delay=drawn.delay, shuffled=True, ordered=flags, seed=drawn.seed + rank)
            return FaultyWindow(window, faults)

        topology = Topology.of(drawn.machines)
        context = WindowContext(open_one, limit)
        options = PutOptions(context=context, purpose="gradients", topology=topology)
        return make_notified(buckets, *parts, options)

    return make


def opened_by(drawn: Draw, limit: float) -> Callable[[int, int, int], Make]:
    """Return what makes the windows of a binding, of a size and a number of notifications."""
    at = bootstraps(drawn.world_size, limit=limit)
    groups: dict[int, WindowGroup] = {}
    lock = threading.Lock()

    def make(binding: int, size: int, notifications: int) -> Make:
        with lock:
            if binding not in groups:
                groups[binding] = WindowGroup(drawn.world_size, size, notifications, drawn.machines)

        def connect(rank: int) -> Window:
            here = replace(at[rank], purpose=f"window/{binding}")
            if drawn.kind == "nixl":
                return nixl_window(here, ADDRESS, size, notifications)
            machines = {"shared": [drawn.world_size], "tcp": [1] * drawn.world_size}
            topology = Topology.of(machines.get(drawn.kind, drawn.machines))
            group, by = topology.groups[topology.group_of(rank)], drawn.connections
            return connect_window(here, group, ADDRESS, size, notifications, connections=by)

        return groups[binding].window if drawn.kind == "inprocess" else connect

    return make


def hunt(runs: int, kinds: Sequence[str], seed: int, limit: float) -> str:
    """Make so many runs; return a line about them. A run at its limit ends the process."""
    kinds_made: Counter[str] = Counter()
    longest = 0.0
    for number in range(seed, seed + runs):
        drawn = draw(number, kinds)
        watch = threading.Timer(limit, hung, [drawn, limit])
        watch.daemon = True
        watch.start()
        begin = time.monotonic()
        train(drawn, 2 * limit)
        longest = max(longest, time.monotonic() - begin)
        watch.cancel()
        watch.join()
        kinds_made[drawn.kind] += 1
    made = ", ".join(f"{kinds_made[kind]} {kind}" for kind in kinds)
    return f"{runs} runs ({made}): none hung, all ranks are equal; the longest took {longest:.1f} s"


def hung(drawn: Draw, limit: float) -> NoReturn:
    """Show what waits for what, and end."""
    print(f"after {limit:g} s this hasn't ended: {drawn}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


def main() -> None:
    """Hunt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--kinds", nargs="+", choices=ALL_KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(hunt(options.runs, options.kinds, options.seed, options.limit))


if __name__ == "__main__":
    main()
