"""Correctness, waits and speed on a GPU: one command, offline, in under five minutes.

    python benchmarks/gpu.py [--device cuda] [--json FILE] [--sections correctness,waits,…]

`make test-gpu` sets up and runs it. With `--device cpu` everything is small: it shows that the
script runs, and nothing about speed. The sections:

    correctness  loops by the library beside plain torch: in one process and in two on one GPU, with
                 fp16, lossy wires, averaging and auto; a run resumed after kill -9; a lost process
    waits        three steps in which torch raises an error where the host waits for the GPU: of a
                 script and of `paceline train`, in worlds of one and two
    step         a ResNet-50's step by plain torch, DDP and Paceline: 256 images of 224 x 224, and 8
                 of 64 x 64
    input        `paceline train` from an LMDB of photographs, beside torch's DataLoader with as
                 many worker processes and beside synthetic images; decoding on the GPU, on all
                 cores and on two
    decode       the same with a model that computes nothing, by the number of decode processes

A row that fails says why, and the others run; the exit status is then 1. A missed target of speed
fails nothing. Rows of one section are measured in turns. A ratio is the median over rounds with a
bootstrap's 95 % interval.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch
from command_line import Options
from gpu_correctness import correctness
from gpu_input import decode, input_
from gpu_rows import Row, Setting, failure, print_rows
from gpu_step import step
from gpu_waits import waits

LIMIT = 290.0  # seconds for all sections
GRACE = 5.0  # seconds after a section's limit, by which its own waits end
SECTIONS: dict[str, tuple[Callable[[Setting], Iterator[Row]], float]] = {
    "correctness": (correctness, 60),
    "waits": (waits, 40),
    "step": (step, 42),
    "input": (input_, 160),
    "decode": (decode, 50),
}
"""Sections by name: what yields their rows, and their limits in seconds."""


class SectionLimit(BaseException):
    """A section takes longer than its limit; no `except Exception` of its rows catches this."""


def main() -> int:
    options = _parser().parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu.py: torch finds no GPU here; --device cpu runs it small.", file=sys.stderr)
        return 2
    end = time.monotonic() + LIMIT
    rows: dict[str, list[Row]] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        for name in options.sections:
            began = time.monotonic()
            setting = Setting(
                device=torch.device(options.device),
                folder=Path(temporary),
                deadline=min(end, began + SECTIONS[name][1]),
            )
            rows[name] = run_section(name, setting)
            seconds[name] = time.monotonic() - began
            print(f"\n{name}, {seconds[name]:.0f} s")
            print_rows(rows[name])
            if options.json is not None:  # what is measured stays, whatever follows
                options.json.write_text(
                    json.dumps(_report(options.device, rows, seconds), indent=1)
                )
    return int(any(row.failed for section in rows.values() for row in section))


def run_section(name: str, setting: Setting) -> list[Row]:
    """Run a section; its last row says what ended it early, if anything did."""
    rows: list[Row] = []
    folder = setting.folder / name
    folder.mkdir()
    try:
        with _time_limit(setting.left):
            for row in SECTIONS[name][0](replace(setting, folder=folder)):
                rows.append(row)
    except (Exception, SectionLimit) as error:
        rows.append(failure(f"section {name}", error))
    return rows


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise an error in the main thread where the block takes longer."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise SectionLimit(f"the section's limit of {seconds:.0f} s has passed")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0) + GRACE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _report(
    device: str, rows: dict[str, list[Row]], seconds: dict[str, float]
) -> dict[str, object]:
    """Return what the JSON file has."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "sections": {
            name: {"seconds": seconds[name], "rows": [row.fields for row in section]}
            for name, section in rows.items()
        },
    }


def _sections(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SECTIONS)}")
    return names


def _parser() -> Options:
    parser = Options(__doc__, figures=True)
    parser.add("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add(
        "--sections",
        type=_sections,
        default=list(SECTIONS),
        help=f"some of them, with commas between: {','.join(SECTIONS)}",
    )
    return parser


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT + 30, exit=True)  # a call into the driver may hang
    sys.exit(main())
