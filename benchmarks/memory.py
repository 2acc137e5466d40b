"""What a run holds in memory, by owner, as multiples of the model's weights in float32.

    python benchmarks/memory.py [--mb 100] [--ranks 1 2 4] [--rows allreduce "sharded without" ddp]

Ranks of one machine, SGD with momentum, a model of flat layers with next to no activations. `peak`
is the most that a process ever had, less what it had before the model was made; memory that
processes share is counted once. The other columns are what each owner holds once a step's gradients
are there (`windows` have the gradients, too, where they moved there), and `rest` is what the peak
has besides: what is there for a moment only, and libraries.
Each number is that of the rank with the highest peak, in the median of `--rounds` runs.

A row is a method of Paceline (bf16: sharded, with `--param_dtype bfloat16`). It may be followed by
`without`, without in-memory snapshots, or by `divided`, with `--snapshot_copies divided`. The rows
ddp and fsdp2 are torch's, which has none.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from command_line import Options, run_script
from memory_rank import OWNERS
from table import print_table

METHODS = ("allreduce", "notified", "sharded", "bf16")
COPIES = ("", " divided", " without")
ROWS = (*(f"{method}{copies}" for copies in COPIES for method in METHODS), "ddp", "fsdp2")
TITLES = ["row", "ranks", "peak", *OWNERS, "rest"]
WIDTHS = [20, 6, 8, *(11 for _ in OWNERS), 8]
LIMIT = 300  # seconds a run
SCRIPT = Path(__file__).parent / "memory_rank.py"


def main() -> None:
    options = _parser().parse_args()
    if options.quick:
        options.mb = 20
        options.rounds = 1
    print(f"{options.mb:g} MB of weights, {options.steps} steps: multiples of the weights")
    lines = [TITLES]
    for row in options.rows:
        for ranks in options.ranks:
            setting = {"mb": options.mb, "steps": options.steps}
            rounds = [run(row, ranks, setting) for _ in range(options.rounds)]
            lines.append(line_of(row, ranks, rounds))
    print_table(lines, WIDTHS, markdown=options.markdown)


def run(row: str, ranks: int, setting: Mapping[str, float]) -> dict[str, float]:
    """Run a row once; return what the rank with the highest peak found."""
    with tempfile.TemporaryDirectory() as results:
        told = json.dumps({**setting, "results": results})
        launcher = ["paceline.cli.main", "launch", "-n", str(ranks), "--", sys.executable]
        if row in ("ddp", "fsdp2"):
            launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = [sys.executable, "-m", *launcher, str(SCRIPT), row, told]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        if done.returncode:
            raise SystemExit(f"{row}, {ranks} ranks:\n{done.stdout}{done.stderr}")
        found = [json.loads(path.read_text()) for path in Path(results).iterdir()]
    return max(found, key=lambda one: one["peak"])


def line_of(row: str, ranks: int, rounds: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a line of the table: medians over the rounds."""
    middle = {name: median(one[name] for one in rounds) for name in ("peak", *OWNERS)}
    rest = middle["peak"] - sum(middle[owner] for owner in OWNERS)
    return [row, str(ranks), *(f"{number:.2f}" for number in [*middle.values(), rest])]


def _parser() -> Options:
    parser = Options(__doc__, quick="20 MB, one round", markdown=True)
    parser.add("--mb", type=float, default=100.0)
    parser.add("--steps", type=int, default=14)
    parser.add("--rounds", type=int, default=3)
    parser.add("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add("--rows", choices=ROWS, nargs="+", default=list(ROWS))
    return parser


if __name__ == "__main__":
    run_script(main)
