"""The benchmark of a step measures links that are as slow as they are said to be."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/step.py"
TINY = ("--model", "resnet20", "--image-size", "8", "--batch", "2", "--rounds", "2", "--steps", "1")
LIMIT = 100


def measure(*links: str) -> str:
    rows = ("--rows", "floor", "ddp:1", "allreduce")
    command = [sys.executable, str(BENCHMARK), *TINY, *rows, "--links", *links]
    done = subprocess.run(command, text=True, capture_output=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plain_stream_carries_what_the_link_was_shaped_to() -> None:
    if os.geteuid() != 0 or shutil.which("tc") is None:
        assert os.environ.get("CI") != "true", "CI must run this test as root, with iproute2"
        pytest.skip("shaped links need root and iproute2")
    out = measure("100mbit")
    carried = re.search(r"carries ([\d.]+) Gbit/s", out)
    assert carried, out
    assert float(carried[1]) <= 0.1 * 1.25  # a burst of 256 kB goes free, of 1.3 MB


def test_a_link_that_can_t_be_made_is_a_sentence_and_the_others_are_measured() -> None:
    out = measure("1furlong", "loopback")
    assert re.search(r"^1furlong: not measured, as .*\.$", out, re.MULTILINE)
    assert re.search(r"^allreduce +\d+", out, re.MULTILINE)
