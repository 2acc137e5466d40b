"""What watching the two gaps of a step costs: the time of its calls, as a share of a step.

    python benchmarks/gaps.py [--model resnet20] [--batch 32] [--sync allreduce notified]

From `optimizer.step()` to the next forward a use of a parameter installs its update, and from
`backward()` to `optimizer.step()` a use of a gradient reduces it (`update/parameter_watch.py`). The
calls that begin and end this are timed, nested ones once, with those that compare the parameters'
versions over a backward. Workers over loopback, one thread each; the larger share of the workers.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from command_line import Options, run_script
from table import print_table
from torch.nn import functional as F

import paceline
from paceline.models.zoo import build_model
from paceline.replica.hooks import ReplicaHooks
from paceline.update.parameter_watch import ParameterWatch

TIMED = (
    (ParameterWatch, "begin"),
    (ParameterWatch, "end"),
    (ReplicaHooks, "_end_watch"),
    (ReplicaHooks, "_watch_backward"),
    (ReplicaHooks, "_end_backward"),
)
TITLES = ["sync", "parameters", "step, ms", "gaps, µs", "share, %"]
WIDTHS = [12, 12, 10, 10, 10]


class Stopwatch:
    """Stopwatch of some methods' calls; a call within another counts once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def time(self, owner: type, name: str) -> None:
        """Time a method from now on."""
        method: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began, self._depth = time.perf_counter(), self._depth + 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)


def main() -> None:
    options = _parser().parse_args()
    lines = [TITLES]
    for sync in options.sync:
        found = paceline.launch(measure, options, sync, workers=options.workers)
        seconds, gaps, parameters = max(found, key=lambda one: one[1] / one[0])
        share = f"{100 * gaps / seconds:.3f}"
        lines.append([sync, str(parameters), f"{1e3 * seconds:.1f}", f"{1e6 * gaps:.1f}", share])
    print_table(lines, WIDTHS, markdown=options.markdown)


def measure(options: argparse.Namespace, sync: str) -> tuple[float, float, int]:
    """Return the seconds of a step and of its gaps, and the number of parameters; on a worker."""
    torch.set_num_threads(1)
    watch = Stopwatch()
    for owner, name in TIMED:
        watch.time(owner, name)
    world = paceline.join()
    model = build_model(options.model, num_labels=10, num_channels=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    paceline.parallelize(model, optimizer, world, sync=sync)
    x = torch.randn(options.batch, 3, options.image_size, options.image_size)
    y = torch.randint(0, 10, (options.batch,))
    began = 0.0
    for step in range(options.skipped + options.steps):
        if step == options.skipped:
            watch.seconds, began = 0.0, time.perf_counter()
        with world.step():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    seconds = (time.perf_counter() - began) / options.steps
    return seconds, watch.seconds / options.steps, len(list(model.parameters()))


def _parser() -> Options:
    parser = Options(__doc__, markdown=True)
    parser.add("--model", default="resnet20")
    parser.add("--image-size", type=int, default=32, help="in pixels")
    parser.add("--batch", type=int, default=32, help="images a worker")
    parser.add("--sync", nargs="+", default=["allreduce", "notified"])
    parser.add("--workers", type=int, default=2)
    parser.add("--steps", type=int, default=100, help="steps that count")
    parser.add("--skipped", type=int, default=20, help="steps before them")
    return parser


if __name__ == "__main__":
    run_script(main)
