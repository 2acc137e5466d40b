"""What a merge of `--sync average` costs: its fraction of the line rate, and slower local steps.

    sudo python benchmarks/merges.py [--quick] [--worlds 2 4 8] [--links 100mbit 1gbit]

Each worker is on a machine of its own, a network namespace. The first table merges random weights
again and again, with nothing to train in between, through a switch; its ideal is a plain stream of
the bytes that each machine must send and receive, in the same rounds.

The second trains `wide` of `accuracy_ways.py` on two machines, a core each. It compares H steps
without a merge with H steps that have one under way, in turns. A merge's work is the processor time
of its threads (transport, reducer) and that of the training thread in the merge's own functions.
Steps that are slowed by more than that work wait for something.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accuracy_ways import MODELS, PACELINE
from command_line import Options, run_script
from exchanges import ITEM, ideal_bytes
from links import connect, switch
from rank_setup import RankSetup, Variant, nothing, open_store, run_of
from ranks import keep_to_own_cores, serve, start
from rounds import interleaved, median_of, paired_ratio
from stream import Stream
from table import print_table
from torch import nn
from torch._C._distributed_c10d import Store
from torch.nn import functional as F

from paceline.algorithms.synchronizer import Weights
from paceline.cluster.supervision.allocator import keep_freed_memory
from paceline.config.world import SyncConfig
from paceline.update.outer.average import Average
from paceline.wiring.average import average_weights

LINE, MERGE = "line", "merge"


@dataclass(frozen=True, kw_only=True)
class Setting(RankSetup):
    """Setting of a rank: its ranks and address, and its work.

    Attributes:
        numel: number of values that are merged; 0: it trains.
        row: of the training, as in `accuracy_ways.py`.
        every: H, steps of a round of the training.
        batch: images a rank.
    """

    numel: int = 0
    row: str = "average"
    every: int = 0
    batch: int = 0


def main() -> None:
    options = _parser().parse_args()
    if options.quick:
        options.rounds, options.merges = 2, 1
    program = Path(__file__)
    numel = round(options.mb * 1e6) // ITEM
    print(f"{options.mb:g} MB of float32, {options.rate} a port, {options.rounds} rounds:\n")
    lines = [["workers", "plain stream, ms", "merge, ms", "of the line rate, 95 %"]]
    for machines in options.worlds:
        with (
            switch(options.rate, machines) as ends,
            start(ends, program, {"rows": [LINE, MERGE], "numel": numel}, machines) as ranks,
        ):
            turns = {
                row: partial(ranks.turn, row, options.merges, over=max) for row in (LINE, MERGE)
            }
            found = interleaved(turns, options.rounds)
        share = paired_ratio(found[LINE], found[MERGE])
        times = [f"{median(found[row]):.0f}" for row in (LINE, MERGE)]
        lines.append([str(machines), *times, f"{share:.3f}"])
    print_table(lines, [8, 18, 11, 27], markdown=options.markdown)
    for link in options.links:
        print_slowing(link, options, program)


def print_slowing(link: str, options: argparse.Namespace, program: Path) -> None:
    """Print, a line a row, how much a merge under way slows local steps."""
    print(f"\n`wide`, {options.batch} images a worker, H = {options.every}, {link}:\n")
    titles = ["", "ms a local step", "with a merge", "slower by, ms a merge", "merge's work, ms"]
    lines = [[*titles, "of which in the training thread, ms"]]
    for row in options.rows:
        work = {"rows": [row], "row": row, "every": options.every, "batch": options.batch}
        plain, merging, works, own = [], [], [], []
        with connect(link) as ends, start(ends, program, work, 2) as ranks:
            for _ in range(options.rounds):
                for answer in map(json.loads, ranks.ask("round")):
                    plain.append(answer["plain"])
                    merging.append(answer["merging"])
                    works.append(1000 * (answer["threads"] + answer["own"]))
                    own.append(1000 * answer["own"])
        slower = [1000 * (b - a) for a, b in zip(plain, merging, strict=True)]
        steps = [f"{1000 * median(values) / options.every:.2f}" for values in (plain, merging)]
        rest = [f"{median_of(values):.0f}" for values in (slower, works)]
        lines.append([row, *steps, *rest, f"{median(own):.0f}"])
    print_table(lines, [14, 16, 14, 24, 24, 36], markdown=options.markdown)


def stream(setting: Setting, store: Store) -> Variant:
    """Make a variant whose step streams the ideal bytes of a merge."""
    size = ideal_bytes(setting.numel, setting.ranks)
    line = Stream(store, rank=setting.rank, ranks=setting.ranks, address=setting.address, size=size)

    def step() -> None:
        line.start()
        line.wait()

    return Variant(step=step, finish=nothing, result=list)


def merge(setting: Setting, store: Store) -> Variant:
    """Make a variant whose step changes all values and merges them."""
    values = torch.randn(setting.numel, generator=torch.Generator().manual_seed(setting.rank))
    model = nn.ParameterList(part.clone() for part in values.split(2**20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config, average = SyncConfig(sync="average"), Average(every=1, delay=0)
    replica = average_weights(model, optimizer, run_of(setting, store), config, average)
    numbers = count()

    @torch.no_grad()
    def step() -> None:
        replica.begin(next(numbers), 1 / setting.ranks, setting.ranks)
        torch._foreach_add_(list(model), 1e-3)
        replica.end()

    return Variant(step=step, finish=partial(replica.settle, Weights.MERGED), result=list)


class Slowing:
    """Local training beside a merge.

    Attributes:
        own: processor seconds of this thread in the merge's functions so far.
    """

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(1)
        self._model = MODELS["wide"][0]().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), lr=0.01, momentum=0.9, nesterov=True, fused=True
        )
        sync, wire = PACELINE[setting.row]
        self._replica = average_weights(
            self._model,
            self._optimizer,
            run_of(setting, open_store(setting, "run")),
            SyncConfig(sync=sync, wire=wire),
            Average(every=setting.every),
        )
        self._inputs = torch.randn(setting.batch, 3, 32, 32)
        self._targets = torch.randint(0, 10, (setting.batch,))
        self._setting, self._numbers, self.own = setting, count(), 0.0
        of_merge = self._replica.rounds
        of_merge.begin = self._counted(of_merge.begin)  # type: ignore[method-assign]
        of_merge.end = self._counted(of_merge.end)  # type: ignore[method-assign]

    def round(self) -> dict[str, float]:
        """Run H steps without a merge, and H with one under way; return seconds."""
        self._replica.settle(Weights.MERGED)
        self._replica.settle(Weights.EQUAL)
        self._model.train()
        start = time.perf_counter()
        for _ in range(self._setting.every):
            self._train()
        plain = time.perf_counter() - start
        # H steps end with a take; the merge travels in the next H, whose first applies nothing
        # and whose last takes again, so that they hold one take, one transfer and one apply.
        self._steps()
        self._steps()
        own, others, start = self.own, _others(), time.perf_counter()
        self._steps()
        merging = time.perf_counter() - start
        answer = {"plain": plain, "merging": merging}
        return answer | {"threads": _others() - others, "own": self.own - own}

    def _steps(self) -> None:
        for _ in range(self._setting.every):
            self._replica.begin(next(self._numbers), 1 / 2, 2)
            self._train()
            self._replica.end()

    def _train(self) -> None:
        F.cross_entropy(self._model(self._inputs), self._targets).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _counted(self, function: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: object, **options: object) -> None:
            start = time.thread_time()
            try:
                function(*arguments, **options)
            finally:
                self.own += time.thread_time() - start

        return counted


def _others() -> float:
    """Return the processor seconds of all threads of this process but this one."""
    return time.process_time() - time.thread_time()


def train() -> None:
    """Be a rank that trains: answer each line with a round's seconds."""
    setting = Setting(**json.loads(sys.argv[1]))
    keep_to_own_cores(setting.rank, setting.ranks)
    torch.set_num_threads(1)
    keep_freed_memory()
    slowing = Slowing(setting)
    slowing.round()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(slowing.round()), flush=True)


def be_rank(given: dict[str, Any]) -> None:
    """Train, or merge in turns with the other workers, as the parent says."""
    if given.get("every"):
        train()
        return
    setting = Setting(**given)
    makers = {LINE: stream, MERGE: merge}
    serve(given["rows"], lambda row: makers[row](setting, open_store(setting, row)))


def _parser() -> Options:
    parser = Options(__doc__, quick="2 rounds of one merge", markdown=True)
    parser.add("--rounds", type=int, default=9)
    parser.add("--merges", type=int, default=3, help="merges a round")
    parser.add("--worlds", type=int, nargs="*", default=[2, 4, 8], metavar="WORKERS")
    parser.add("--rate", default="200mbit", help="of a switch's port")
    parser.add("--mb", type=float, default=36, help="millions of bytes of weights")
    parser.add("--links", nargs="*", default=["100mbit", "1gbit"], help="for the second table")
    parser.add("--rows", nargs="+", default=["average", "average-int8", "average-int4"])
    parser.add("--every", type=int, default=64, help="H")
    parser.add("--batch", type=int, default=32, help="images a worker")
    return parser


if __name__ == "__main__":
    run_script(main, be_rank)
