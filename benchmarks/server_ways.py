"""One ResNet-20 script on CIFAR-10 through each exchange: accuracy over seeds, and time.

    python benchmarks/server_ways.py cifar10/train cifar10/test [--results FOLDER] [--quick]

Only the exchange's name changes (`server_script.py`); three workers of one machine and, with
`server`, a server share its cores. A way that this version refuses is left out, with the sentence.
With `--ways notified autocast bfloat16 float16` it compares weights of 16 bits (`--param_dtype`).
`--results` keeps what each run found, and the same command resumes there. `server_rates.py` has the
speeds of workers that are uneven.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from command_line import Options, run_script
from table import print_table
from time_to_accuracy import read

WAYS = [
    *("allreduce", "notified", "server", "server:staleness=2", "server:staleness=8"),
    *("server:staleness=async", "average:every=16", "average:every=16,through=server"),
]
TITLES = ["", "accuracy, %", "by seed", "s a run", "images/s", "staleness of the reads"]
WIDTHS = [34, 15, 26, 9, 10, 60]
LIMIT = 1800  # seconds a run


class RefusedError(Exception):
    """A run ended with an error: its last line."""


def main() -> None:
    options = _parser().parse_args()
    if options.quick:
        options.images = 1000
        options.epochs = 1
        options.seeds = options.seeds[:1]
    with tempfile.TemporaryDirectory() as folder:
        options.arrays = Path(folder, "arrays")
        options.arrays.mkdir()
        options.results = options.results or Path(folder, "results")
        options.results.mkdir(exist_ok=True)
        images = read(options, "train", options.train)
        read(options, "test", options.test)
        print(f"{images:,} images, {options.epochs} epochs, {options.workers} workers", flush=True)
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
        for seed in options.seeds:
            for way in [way for way in options.ways if way in found]:
                try:
                    found[way].append(result(options, way, seed, images))
                except RefusedError as error:
                    print(f"{way}: left out: {error}", flush=True)
                    del found[way]
                else:
                    print(f"{way}, seed {seed}: {found[way][-1]['accuracy']:.2%}", flush=True)
    lines = [TITLES, *(_line(way, runs) for way, runs in found.items())]
    print()
    print_table(lines, WIDTHS, markdown=options.markdown)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def result(options: argparse.Namespace, way: str, seed: int, images: int) -> dict[str, Any]:
    """Train, or return what a run of the same work has found before.

    Raises:
        RefusedError: the run failed.
    """
    work = {"seed": seed, "epochs": options.epochs, "batch": options.batch}
    parts = [way, images, options.workers, *work.values()]
    name = re.sub(r"[^a-z0-9-]+", "-", "-".join(map(str, parts)))
    file: Path = options.results / f"{name}.json"
    if not file.exists():
        file.write_text(json.dumps(_run(options, way, work)))
    known: dict[str, Any] = json.loads(file.read_text())
    return known


def _run(options: argparse.Namespace, way: str, work: Mapping[str, int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as results:
        words = {**work, "data": str(options.arrays), "results": results}
        script = [sys.executable, str(Path(__file__).with_name("server_script.py"))]
        launch(options.workers, way, [*script, way, json.dumps(words)], limit=LIMIT)
        ranks = [json.loads(file.read_text()) for file in Path(results).iterdir()]
    reads: Counter[str] = Counter()
    for rank in ranks:
        reads.update(rank["staleness"])
    seconds = max(rank["seconds"] for rank in ranks)
    return {**ranks[0], "seconds": seconds, "staleness": reads}


def launch_command(workers: int, way: str) -> list[str]:
    """Return the beginning of the command that starts workers, and a server where one is needed."""
    command = [sys.executable, "-m", "paceline.cli.main", "launch", "-n", str(workers)]
    if way.startswith("server") or "through=server" in way:
        command += ["--num_servers", "1"]
    return [*command, "--"]


def launch(workers: int, way: str, script: Sequence[str], *, limit: float) -> None:
    """Run a script to its end.

    Raises:
        RefusedError: it failed.
    """
    process = subprocess.run(
        [*launch_command(workers, way), *script],
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    if process.returncode:
        raise RefusedError(reason_in(process.stderr))


def reason_in(text: str) -> str:
    """Return the first sentence that says why a run failed, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error: " in line or "ConfigError" in line]
    return next(iter(errors), lines[-1] if lines else "it said nothing")


def histogram(reads: Mapping[str, int]) -> str:
    """Return how often each staleness occurred, in percent of all reads."""
    everything = sum(reads.values())
    shares = sorted((int(stale), count / everything) for stale, count in reads.items())
    return ", ".join(f"{stale}: {share:.0%}" for stale, share in shares)


def _line(way: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    accuracies = [100 * run["accuracy"] for run in runs]
    spread = f" ± {stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
    seconds = mean(run["seconds"] for run in runs)
    reads: Counter[str] = Counter()
    for run in runs:
        reads.update(run["staleness"])
    return [
        way,
        f"{mean(accuracies):.2f}{spread}",
        ", ".join(f"{accuracy:.2f}" for accuracy in accuracies),
        f"{seconds:.0f}",
        f"{mean(run['images'] / run['seconds'] for run in runs):.0f}",
        histogram(reads),
    ]


def _parser() -> Options:
    parser = Options(__doc__, quick="1,000 images, one epoch and seed", markdown=True, figures=True)
    parser.add("train", type=Path, help="class folders of images, 32 x 32")
    parser.add("test", type=Path)
    parser.add("--results", type=Path, help="folder that keeps what each run found")
    parser.add("--ways", nargs="+", default=WAYS, metavar="SYNC")
    parser.add("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add("--workers", type=int, default=3)
    parser.add("--images", type=int, default=10_000)
    parser.add("--epochs", type=int, default=6)
    parser.add("--batch", type=int, default=120, help="images of a global batch")
    return parser


if __name__ == "__main__":
    run_script(main)
