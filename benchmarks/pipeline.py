"""Pipelines: Paceline beside torch.distributed.pipelining, the schedule's bound, and its bubble.

    python benchmarks/pipeline.py [--quick] [--model gpt|resnet50] [--rates 200mbit 1gbit]
    python benchmarks/pipeline.py --bubble [--quick]

Two stages on two machines (network namespaces, which need root), each with one thread on a core of
its own. What each row does is in `pipeline_ranks.py`, how it is timed in `ranks.py`. The model is a
transformer of about 100 million parameters with the default of `--layers`, cut in its middle, or
ResNet-50, cut before its third layer, where `--cuts` names no other block. A process has one world
of Paceline, so each of its rows is in a start of its own, with torch's rows beside it; torch's best
is that with the smaller median.

The *bound* is the time of the schedule's critical path: `schedule_times.simulate` with what the
passes of each stage take without a link, and with the seconds in which a plain stream carries the
activations of a microbatch, both measured in the same rounds; and the optimizer's step.

`--bubble` compares the idle share of each stage, the median of some steps, with that of the
schedule, simulated with the mean times of the passes: two stages that compute, and four that wait
in place of computing, on this machine. At the end it draws a step of `zb-h1` as it was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from command_line import Options, run_script
from links import LOOPBACK, connect, measuring
from ranks import Ranks, start
from rounds import interleaved, paired_ratio
from table import print_table

from paceline.parallel.schedule_picture import column_seconds, draw
from paceline.parallel.schedule_times import Link, PassSeconds, Span, idle_shares, simulate
from paceline.parallel.schedules import SCHEDULES, Task, make_schedule

PROGRAM = Path(__file__).with_name("pipeline_ranks.py")
LINE = "line"
TORCH = ["torch-gpipe", "torch-1f1b"]
RATES = ["200mbit", "1gbit"]
STAGES = 2
TITLES = ["", "ms a step", "speed / torch's best", "bound, ms", "bound / its"]
WIDTHS = [14, 11, 24, 11, 24]
BUBBLE_TITLES = ["", "M", "stage", "idle, %", "the schedule's, %", "points"]
BUBBLE_WIDTHS = [8, 4, 7, 9, 19, 8]
PICTURE_WIDTH = 100
EVEN_LAYERS = 24
EVEN_BATCH = 128


def main() -> None:
    options = _parser().parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the namespaces have no names of hosts
    os.environ.setdefault("PACELINE_SECRET", secrets.token_hex())
    if options.quick:
        options.rounds = 2
        options.steps = 1
        options.bubble_steps = 2
        options.warm_up = 1
    found = _bubbles(options) if options.bubble else _speeds(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def _speeds(options: argparse.Namespace) -> list[dict[str, Any]]:
    print(
        f"{options.model}, batch {options.batch} in {options.microbatches} microbatches; "
        f"{options.rounds} rounds of {options.steps} steps",
        flush=True,
    )
    found: list[dict[str, Any]] = []
    for rate in options.rates:
        with measuring(rate):
            found += measure(rate, options)
    return found


def measure(rate: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all rows over one link, and print its table; return the rows.

    Raises:
        LinkError: the link can't be made here.
    """
    found: list[dict[str, Any]] = []
    with connect(rate) as machines:
        print(f"\n{rate}:", flush=True)
        for row in options.schedules:
            rows = [LINE, *options.torch, row]
            work = _work(options, rows, machines[0].address)
            with start(machines, PROGRAM, work, STAGES) as ranks:
                turns: dict[str, Any] = {
                    name: partial(ranks.turn, name, options.steps) for name in rows
                }
                turns["parts"] = partial(_parts, ranks, row, options.steps)
                turned = interleaved(turns, options.rounds)
            found += results(row, rate, turned, options.microbatches)
    lines = [TITLES]
    for each in found:
        ratios = [str(each[name]) if each[name] else "" for name in ("speed", "reached")]
        bound = f"{each['bound']:.0f}" if each["bound"] else ""
        lines.append([each["row"], f"{each['ms']:.1f}", ratios[0], bound, ratios[1]])
    print_table(lines, WIDTHS, markdown=options.markdown)
    return [each | {"speed": str(each["speed"]), "reached": str(each["reached"])} for each in found]


def _parts(ranks: Ranks, schedule: str, steps: int) -> Any:
    """Ask each stage what its passes take."""
    return [json.loads(answer) for answer in ranks.ask(f"parts:{schedule} {steps}")]


def results(
    row: str, rate: str, turned: Mapping[str, Sequence[Any]], microbatches: int
) -> list[dict[str, Any]]:
    """Return what was measured in a start: the lines of torch's rows, and of Paceline's row."""
    torchs = [name for name in turned if name in TORCH]
    best = min(torchs, key=lambda name: median(turned[name]), default=row)
    bounds = [
        1e3 * bound(row, microbatches, parts, milliseconds / 1e3)
        for parts, milliseconds in zip(turned["parts"], turned[LINE], strict=True)
    ]
    found = []
    for name in (*torchs, row):
        ours = name == row
        found.append(
            {
                "row": name,
                "beside": row,
                "rate": rate,
                "ms": median(turned[name]),
                "speed": paired_ratio(turned[best], turned[name]),
                "bound": median(bounds) if ours else None,
                "reached": paired_ratio(bounds, turned[name]) if ours else None,
                "rounds": list(turned[name]),
            }
        )
    return found


def bound(
    schedule: str, microbatches: int, parts: Sequence[Mapping[str, float]], stream: float
) -> float:
    """Return the seconds of a step by a schedule's critical path.

    Args:
        schedule: its name.
        microbatches: of a step.
        parts: by stage, the seconds of its passes and of its optimizer's step.
        stream: the seconds in which a link carries a step's activations.
    """
    passes: Sequence[Any] = parts
    links = [Link(sending=stream / microbatches)] * (len(parts) - 1)
    spans = simulate(make_schedule(schedule, len(parts), microbatches), passes, links)
    return max(span.end + parts[span.stage]["optimizer"] for span in spans)


def _bubbles(options: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    lines = [BUBBLE_TITLES]
    last: list[Span] = []
    for stages, model in ((2, "mlp"), (4, "waiting")):
        for microbatches in (stages, 2 * stages, 4 * stages):
            for row in options.schedules:
                steps = _measured_steps(row, stages, model, microbatches, options)
                for stage, (idle, own) in enumerate(compare(row, microbatches, steps)):
                    points = f"{100 * (idle - own):+.1f}"
                    of = [row, str(microbatches), str(stage)]
                    lines.append([*of, f"{100 * idle:.1f}", f"{100 * own:.1f}", points])
                    of_stage = {"model": model, "stages": stages, "idle": idle, "own": own}
                    found.append({"row": row, "microbatches": microbatches, **of_stage})
                if row == "zb-h1" and microbatches == 2 * stages:
                    last = steps[-1]
    print_table(lines, BUBBLE_WIDTHS, markdown=options.markdown)
    if last:
        print("\nA step of zb-h1, as it was measured:")
        print("\n".join(draw(last, column_seconds(last, PICTURE_WIDTH))))
    return found


def _measured_steps(
    row: str, stages: int, model: str, microbatches: int, options: argparse.Namespace
) -> list[list[Span]]:
    """Return the spans of some steps of a row, on this machine."""
    asked = {
        "model": model,
        "microbatches": microbatches,
        "layers": EVEN_LAYERS,
        "batch": EVEN_BATCH,
        "cuts": [],
    }
    with connect(LOOPBACK) as machines:
        work = _work(options, [row], machines[0].address) | asked
        with start(machines[:1], PROGRAM, work, stages) as ranks:
            answers = ranks.ask(f"spans:{row} {options.bubble_steps}")
    return steps_of([json.loads(answer) for answer in answers])


def steps_of(answers: Sequence[Sequence[Sequence[Any]]]) -> list[list[Span]]:
    """Return the spans of all stages, step by step; their clock is the machine's."""
    return [
        [
            Span(stage, Task(kind, microbatch), begin, end)
            for stage, tasks in enumerate(of_stages)
            for kind, microbatch, begin, end in tasks
        ]
        for of_stages in zip(*answers, strict=True)
    ]


def compare(
    row: str, microbatches: int, steps: Sequence[Sequence[Span]]
) -> list[tuple[float, float]]:
    """Return of each stage its idle share, the median of some steps, and the schedule's own."""
    measured = [idle_shares(spans) for spans in steps]
    seconds: list[dict[Any, list[float]]] = [defaultdict(list) for _ in measured[0]]
    for spans in steps:
        for span in spans:
            seconds[span.stage][span.task.kind].append(span.end - span.start)
    passes: list[PassSeconds] = [
        {kind: fmean(values) for kind, values in kinds.items()} for kinds in seconds
    ]
    schedule = make_schedule(row, len(passes), microbatches)
    own = idle_shares(simulate(schedule, passes, [Link()] * (len(passes) - 1)))
    return [
        (median(values), figure)
        for values, figure in zip(zip(*measured, strict=True), own, strict=True)
    ]


def _work(options: argparse.Namespace, rows: Sequence[str], master: str) -> dict[str, object]:
    names = ("model", "batch", "microbatches", "layers", "image_size", "cuts", "wait_ms", "warm_up")
    return {name: getattr(options, name) for name in names} | {"rows": rows, "master": master}


def _parser() -> Options:
    parser = Options(__doc__, quick="2 rounds of 1 step", markdown=True, figures=True)
    parser.add("--bubble", action="store_true", help="idle shares in place of speeds")
    parser.add("--model", choices=["gpt", "resnet50"], default="resnet50")
    parser.add("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    parser.add("--torch", nargs="*", choices=TORCH, default=TORCH)
    parser.add("--rates", nargs="+", default=RATES)
    parser.add("--batch", type=int, default=16)
    parser.add("--microbatches", type=int, default=8)
    parser.add("--layers", type=int, default=12, help="of the gpt")
    parser.add("--image_size", type=int, default=128)
    parser.add(
        "--cuts", nargs="*", default=[], help="child of the model that begins the second stage"
    )
    parser.add("--wait_ms", type=float, default=20.0, help="of a pass that waits")
    parser.add("--rounds", type=int, default=7)
    parser.add("--steps", type=int, default=2)
    parser.add(
        "--warm_up",
        type=int,
        default=15,
        help="steps first; the first few are checked for mistakes",
    )
    parser.add("--bubble_steps", type=int, default=20)
    return parser


if __name__ == "__main__":
    run_script(main)
