"""How long training takes to a stated accuracy on slow links: CIFAR-10, two machines.

    python benchmarks/time_to_accuracy.py cifar10/train cifar10/test --results FOLDER
        [--model resnet20|wide] [--links 100mbit 1gbit] [--rows ddp:1 powersgd:2 …] [--accuracy 0.8]

The two machines are network namespaces with a shaped link between them, and a core each. `wide` has
34 MB of gradients and little computation; rows are listed in `accuracy_ways.py`.

What a way computes doesn't depend on the link. So each way is trained once, on a fast link, which
gives its steps to the accuracy; on each link its steps are timed. The time to the accuracy is
their product. DDP and Paceline's methods with fp32 on the wire are *exact*: they have one curve.
Evaluations are on no clock and send nothing over the link. They have the mean of all ranks'
weights; with averaging, the weights of the last merge that was applied, as `model.eval()` does.

With `--links` and no rate, nothing is timed. What FOLDER has already isn't run again: the same
command resumes it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accuracy_ways import MODELS, PACELINE, average_of
from command_line import Options, run_script
from links import connect
from PIL import Image
from ranks import start
from table import method_of, print_table

from paceline.errors import ConfigError

FAST = "10gbit"
RANKS = 2
NONE = "none"
EXACT = {"ddp", "allreduce", "notified"}
NUMBERED = {"ddp": "MiB", "powersgd": "rank", "postlocal": "period"}
ROWS = [
    *(NONE, "ddp:1", "ddp:8", "ddp:25", "powersgd:1", "powersgd:4", "postlocal:16"),
    *("notified", "notified-bf16", "notified-int8"),
    *("average:every=16", "average:every=16,outer=diloco", "average-int8:every=16"),
]
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def main() -> None:
    options = _parser().parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        options.arrays = Path(folder)
        options.train_images = read(options, "train", options.train)
        options.test_images = read(options, "test", options.test)
        curves = {}
        for row in options.rows:
            curve = curve_of(row)
            if curve != NONE and curve not in curves:
                curves[curve] = result(options, row, FAST, "train")
                print(f"{curve}: {best(curves[curve], options):.2%} at best", flush=True)
        for link in options.links:
            timed = {
                row: result(options, row, link, f"time {options.timed}") for row in options.rows
            }
            print(f"\n{title(options, link, timed)}\n")
            print_link(options, timed, curves)


def curve_of(row: str) -> str:
    """Return the name of the curve that a row's training follows."""
    return "exact" if method_of(row) in EXACT else row


def warm_up_of(row: str, options: argparse.Namespace) -> int:
    """Return the number of steps of plain DDP with which a row begins."""
    warm_up = {"powersgd": options.start_powersgd, "postlocal": options.warm_up}
    return warm_up.get(method_of(row), 0)


def read(options: argparse.Namespace, part: str, folder: Path) -> int:
    """Decode class folders into arrays for the ranks; return the number of images."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    files = [
        (file, i) for i, name in enumerate(names) for file in sorted((folder / name).iterdir())
    ]
    if part == "train" and options.images:
        files = files[:: max(1, len(files) // options.images)][: options.images]
    pixels = np.stack([np.asarray(Image.open(file).convert("RGB")) for file, _ in files])
    np.save(options.arrays / f"{part}_images.npy", pixels.transpose(0, 3, 1, 2))
    np.save(options.arrays / f"{part}_labels.npy", np.array([label for _, label in files]))
    return len(files)


def result(options: argparse.Namespace, row: str, link: str, line: str) -> list[Any]:
    """Return the ranks' answers to a line, or those that were saved."""
    work = {
        "model": options.model,
        "batch": options.batch,
        "epochs": options.epochs,
        "evaluate": options.evaluate,
        "warm_up": warm_up_of(row, options),
        "seed": options.seed,
    }
    name = curve_of(row) if line == "train" else row
    identity = json.dumps([work, name, link, line, options.train_images, options.test_images])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    file = (
        options.results / f"{options.model}-{re.sub(r'[^a-z0-9-]', '-', name)}-{link}-{digest}.json"
    )
    if not file.exists():
        with connect(link) as machines:
            work |= {"data": str(options.arrays), "interface": machines[0].interface}
            program = Path(__file__).with_name("accuracy_ways.py")
            with start(machines, program, {**work, "rows": [row]}, RANKS) as ranks:
                file.write_text("\n".join(ranks.ask(line)))
    return [json.loads(answer) for answer in file.read_text().splitlines() if answer]


def accuracies(curve: Sequence[Sequence[int]], options: argparse.Namespace) -> list[float]:
    """Return the accuracy at each evaluation, of all ranks' test images."""
    return [sum(of_rank) / options.test_images for of_rank in zip(*curve, strict=True)]


def best(curve: Sequence[Sequence[int]], options: argparse.Namespace) -> float:
    """Return the highest accuracy of a curve."""
    return max(accuracies(curve, options))


def steps_to(curve: Sequence[Sequence[int]], options: argparse.Namespace) -> int | None:
    """Return the number of steps at the first evaluation with the accuracy; None: it has none."""
    total = options.train_images // (options.batch * RANKS) * options.epochs
    for number, accuracy in enumerate(accuracies(curve, options), 1):
        if accuracy >= options.accuracy:
            return min(number * options.evaluate, total)
    return None


def seconds_to(timed: Sequence[Mapping[str, float]], steps: int, warm_up: int) -> float:
    """Return the seconds of so many steps, those of the warm-up at their own pace."""
    in_warm_up, after = (max(of_rank[key] for of_rank in timed) for key in ("warm_up", "step"))
    return min(steps, warm_up) * in_warm_up + max(0, steps - warm_up) * after


def print_link(
    options: argparse.Namespace,
    timed: Mapping[str, Sequence[Mapping[str, float]]],
    curves: Mapping[str, Sequence[Sequence[int]]],
) -> None:
    """Print a line a row: its traffic, its steps, and its time to the accuracy."""
    goal = f"{options.accuracy:.0%}"
    titles = ["", "MB a step", "ms a step", "mean Mbit/s", "peak Mbit/s"]
    lines = [[*titles, f"steps to {goal}", f"seconds to {goal}", "final"]]
    for row, answers in timed.items():
        seconds, sent = (max(a[key] for a in answers) for key in ("step", "sent"))
        peak = max(a["peak"] for a in answers)
        cells = [f"{sent / 1e6:.2f}", f"{1000 * seconds:.0f}"]
        cells += [f"{8e-6 * sent / seconds:.1f}", f"{8e-6 * peak:.1f}"]
        curve = curves.get(curve_of(row))
        steps = steps_to(curve, options) if curve else None
        warm_up = warm_up_of(row, options)
        cells.append("–" if steps is None else f"{steps:,}")
        cells.append("–" if steps is None else f"{seconds_to(answers, steps, warm_up):,.0f}")
        cells.append(f"{accuracies(curve, options)[-1]:.2%}" if curve else "–")
        lines.append([row, *cells])
    print_table(lines, [32, 10, 10, 12, 12, 14, 16, 9], markdown=options.markdown)


def title(
    options: argparse.Namespace, link: str, timed: Mapping[str, Sequence[Mapping[str, float]]]
) -> str:
    """Say what is trained, and how much longer its exchange takes than its computation."""
    model = MODELS[options.model][0]()
    values = sum(p.numel() for p in model.parameters())
    text = f"{options.model}, {values:,} parameters, {options.batch} images a rank, {link}"
    if NONE not in timed:
        return text
    compute = max(of_rank["step"] for of_rank in timed[NONE])
    exchange = 8 * 4 * values * 2 * (RANKS - 1) / RANKS / rate_of(link)
    return f"{text}; fp32 gradients take {exchange / compute:.1f} times the computation of a step"


def rate_of(link: str) -> float:
    """Return the bits a second of a rate such as 100mbit."""
    return float(link[:-4]) * UNITS[link[-4:]]


def _row(row: str) -> str:
    method, colon, number = row.partition(":")
    if method in NUMBERED:
        if not number.isdecimal() or int(number) < 1:
            kind = NUMBERED[method]
            raise argparse.ArgumentTypeError(f"{row}: give its {kind}, as in {method}:4")
    elif method not in (NONE, *PACELINE) or (colon and not method.startswith("average")):
        known = ", ".join((NONE, *(f"{name}:N" for name in NUMBERED), *PACELINE))
        raise argparse.ArgumentTypeError(f"{row!r} is none of {known}")
    elif method.startswith("average"):
        _check_average(row)
    return row


def _check_average(row: str) -> None:
    try:
        average = average_of(row)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{row}: {error}") from None
    if average is not None and len(average.phases) > 1:
        raise argparse.ArgumentTypeError(f"{row}: phases differ in speed; give one H")


def _link(link: str) -> str:
    if link[-4:] not in UNITS or not link[:-4].replace(".", "", 1).isdecimal():
        raise argparse.ArgumentTypeError(f"{link!r} is no rate, such as 100mbit")
    return link


def _parser() -> Options:
    parser = Options(__doc__, markdown=True)
    parser.add("train", type=Path, help="class folders of the training images")
    parser.add("test", type=Path, help="class folders of the test images")
    parser.add("--results", type=Path, required=True, help="folder for the results")
    parser.add("--model", choices=sorted(MODELS), default="resnet20")
    parser.add("--links", nargs="*", type=_link, default=["100mbit", "1gbit"])
    parser.add("--rows", nargs="+", type=_row, default=ROWS, help=f"default: {' '.join(ROWS)}")
    parser.add("--accuracy", type=float, default=0.8)
    parser.add("--batch", type=int, default=32, help="images a rank")
    parser.add("--epochs", type=int, default=10)
    parser.add("--images", type=int, default=0, help="training images; 0: all")
    parser.add("--evaluate", type=int, default=200, help="steps between evaluations")
    parser.add(
        "--start-powersgd",
        type=int,
        default=2,
        help="steps of plain DDP before PowerSGD, of which torch demands 2",
    )
    parser.add("--warm-up", type=int, default=100, help="steps before `model_averaging`")
    parser.add("--timed", type=int, default=16, help="steps that are timed")
    parser.add("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    run_script(main)
