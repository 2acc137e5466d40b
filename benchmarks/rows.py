"""Bytes and milliseconds a step of a language model, with a dense and with a row-sparse embedding.

    python benchmarks/rows.py [--quick] [--sync allreduce notified] [--ranks 2] [--machines 1]

An LSTM of 12 million parameters: a table of 10,000 words, two layers, an output layer of 10,000
words; 20 sentences of 35 words a rank, drawn by Zipf's law as words of a text are, Adagrad over all
parameters. `dense` has `nn.Embedding(…)`, `rows` has `nn.Embedding(…, sparse=True)`; nothing else
differs. The bytes are those that rank 0 recorded in its event file, the median of the steps. With
`notified`, ranks of one machine share memory, and only rows are sent. With several `--machines` of
`--ranks` each, which are processes of this one, other gradients are sent as well, over loopback.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from command_line import Options, run_script
from table import print_table
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.observe.event_file import find_event_files, read_events

WORDS, WIDTH, SENTENCES, LENGTH = 10_000, 440, 20, 35
TABLES = ("dense", "rows")
TITLES = ["sync, table", "parameters", "ms a step", "MB sent", "MB received"]
WIDTHS = [22, 14, 14, 14, 14]
PARTS = ("compute_ms", "exposed_ms", "send_ms", "update_ms", "snapshot_ms")
FIRST = 2  # steps that aren't measured


class LanguageModel(nn.Module):
    """An LSTM that predicts each next word."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Return the next words' scores, (sentences, length, WORDS), of words, int64."""
        scores: Tensor = self.out(self.lstm(self.words(words))[0])
        return scores


def main() -> None:
    options = _parser().parse_args()
    if options.train:
        folder, sync, table, steps = options.train
        train(Path(folder), sync, sparse=table == "rows", steps=int(steps))
        return
    steps = 6 if options.quick else options.steps
    lines = [TITLES]
    for sync in options.sync:
        for table in TABLES:
            with tempfile.TemporaryDirectory() as folder:
                work = ["--train", folder, sync, table, str(steps)]
                launch(folder, options.machines, options.ranks, [sys.executable, __file__, *work])
                lines.append([f"{sync}, {table}", *_numbers(Path(folder))])
    print_table(lines, WIDTHS, markdown=options.markdown)


def launch(folder: str, machines: int, ranks: int, command: list[str]) -> None:
    """Run a command in the ranks of some machines; return when all have ended well."""
    program = [str(Path(sys.executable).with_name("paceline")), "launch", "-n", str(ranks)]
    if machines > 1:
        program += ["--num_shards", str(machines), "--run_id", "rows"]
        program += ["--file_store_path", folder]
    started = [
        subprocess.Popen([*program, "--shard_id", str(machine), "--", *command])
        for machine in range(machines)
    ]
    statuses = [process.wait() for process in started]
    if any(statuses):
        sys.exit("A rank failed; its error is above.")


def train(folder: Path, sync: str, *, sparse: bool, steps: int) -> None:
    """Be a rank: train some steps, which the run's event file records."""
    torch.set_num_threads(1)
    with paceline.join(folder / "run") as world:
        torch.manual_seed(1)
        model = LanguageModel(sparse=sparse)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
        paceline.parallelize(model, optimizer, world, sync=sync)
        random = torch.Generator().manual_seed(world.rank)
        frequencies = 1 / torch.arange(1, WORDS + 1, dtype=torch.float64)
        for _ in range(steps):
            count = SENTENCES * (LENGTH + 1)
            drawn = torch.multinomial(frequencies, count, replacement=True, generator=random)
            words = drawn.view(SENTENCES, LENGTH + 1)
            with world.step(samples=SENTENCES):
                scores = model(words[:, :-1])
                F.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()


def _numbers(folder: Path) -> list[str]:
    """Return the rest of a run's line of the table."""
    (_, path), *_ = find_event_files(folder / "run")
    steps = [event for event in read_events(path) if event["event"] == "step"][FIRST:]
    milliseconds = median(sum(step[part] for part in PARTS) for step in steps)
    parameters = sum(p.numel() for p in LanguageModel(sparse=False).parameters())
    megabytes = [median(step[name] for step in steps) / 1e6 for name in ("sent", "received")]
    return [f"{parameters:,}", f"{milliseconds:.0f}", *(f"{value:.2f}" for value in megabytes)]


def _parser() -> Options:
    parser = Options(__doc__, quick="6 steps", markdown=True)
    parser.add("--steps", type=int, default=30)
    parser.add("--ranks", type=int, default=2)
    parser.add("--machines", type=int, default=1)
    parser.add(
        "--sync", nargs="+", choices=["allreduce", "notified"], default=["allreduce", "notified"]
    )
    parser.add("--train", nargs=4, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    run_script(main)
